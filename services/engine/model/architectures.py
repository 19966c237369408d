"""The common parts of models of one architecture: a process builds them once for all its models.

- Tokenizers, by the content of their files.
- Configurations, by the content of config.json.
- Skeletons: modules without weights, by class, configuration, dtype and the tensors of the
  checkpoint. transformers builds the first model of an architecture. Further models are copies of
  its modules with their own tensors. Architectures with converted parameters have no skeleton.
- Bytes of KV cache per token, measured by the first model's warm-up.

Models with code of their own share nothing.
"""

from __future__ import annotations

import copy
import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from services.engine.model import checkpoint
from services.engine.model.module_copy import copy_modules
from services.engine.model.segment import Segment
from services.engine.tokenization import Tokenization
from shared.contracts.models import ModelCard

V = TypeVar("V")
_KEPT = 16
"""Values that a process keeps of each kind."""
_TOKENIZER_FILES = ("tokenizer*", "*.model", "vocab*", "merges*", "special_tokens_map.json", "added_tokens.json", "chat_template*")


class _Recent(Generic[V]):
    """The values of the most recently used keys. Thread-safe."""

    def __init__(self) -> None:
        self._values: OrderedDict[Hashable, V] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Hashable) -> V | None:
        with self._lock:
            if key in self._values:
                self._values.move_to_end(key)
            return self._values.get(key)

    def put(self, key: Hashable, value: V) -> V:
        with self._lock:
            self._values[key] = value
            while len(self._values) > _KEPT:
                self._values.popitem(last=False)
        return value

    def get_or_make(self, key: Hashable, make: Callable[[], V]) -> V:
        """Return the value of the key; make it if it is unknown."""
        found = self.get(key)
        return found if found is not None else self.put(key, make())


@dataclass
class Architecture:
    """A skeleton, and measurements of its first model.

    Attributes:
        skeleton: The model on the meta device; None: models of this architecture cannot share one.
        names: The checkpoint's tensor of each parameter, by the parameter's name.
        token_bytes: KV cache per token; None: not measured yet.
    """

    skeleton: PreTrainedModel | None
    names: dict[str, str]
    token_bytes: int | None = None


class ModelCache:
    """The common parts of the models of one process. Thread-safe."""

    def __init__(self) -> None:
        self._tokenizations: _Recent[Tokenization] = _Recent()
        self._configs: _Recent[PreTrainedConfig] = _Recent()
        self._architectures: _Recent[Architecture] = _Recent()

    def tokenization(self, directory: Path, *, trust_remote_code: bool) -> Tokenization:
        """Return the tokenizer in `directory`, warmed up. Raises `CheckpointInvalid`."""

        def read() -> Tokenization:
            found = Tokenization.read(directory, trust_remote_code)
            found.warm()
            return found

        if trust_remote_code:
            return read()
        return self._tokenizations.get_or_make(_digest(directory, (*_TOKENIZER_FILES, "config.json")), read)

    def config(self, directory: Path, card: ModelCard) -> PreTrainedConfig:
        """Return the contents of config.json. Raises as `checkpoint.read_config`."""
        if card.spec.trust_remote_code:
            return checkpoint.read_config(directory, card)
        known = self._configs.get_or_make(_digest(directory, ("config.json",)), lambda: checkpoint.read_config(directory, card))
        return copy.deepcopy(known)

    def bind(
        self,
        kind: type[PreTrainedModel],
        config: PreTrainedConfig,
        segment: Segment,
        dtype: torch.dtype,
        card: ModelCard,
        *,
        is_packed: bool,
    ) -> tuple[PreTrainedModel, Architecture | None]:
        """Build the model with its parameters bound to the segment. Raises as `checkpoint.bind`.

        Returns:
            The model, and its architecture if the cache keeps it.
        """
        tensors = segment.tensors()
        if card.spec.trust_remote_code or not is_packed:
            return checkpoint.bind(kind, config, tensors, dtype, is_packed=is_packed), None
        shapes = tuple(sorted((name, str(t.dtype), tuple(t.shape)) for name, t in tensors.items()))
        described = {k: v for k, v in config.to_dict().items() if k != "_name_or_path"}
        key = (kind, repr(sorted(described.items(), key=lambda item: item[0])), dtype, shapes)
        known = self._architectures.get(key)
        if known is not None and known.skeleton is not None:
            return _fill(known.skeleton, known.names, tensors), known
        model = checkpoint.bind(kind, config, tensors, dtype, is_packed=is_packed)
        return model, known if known is not None else self._architectures.put(key, _architecture(model, segment, tensors))


def _digest(directory: Path, patterns: tuple[str, ...]) -> str:
    """Return a digest of the names and contents of the directory's files that match."""
    digest = hashlib.sha256()
    for path in sorted({found for pattern in patterns for found in directory.glob(pattern) if found.is_file()}):
        content = path.read_bytes()
        digest.update(f"{path.name}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()


def _architecture(model: PreTrainedModel, segment: Segment, tensors: dict[str, torch.Tensor]) -> Architecture:
    """Return the architecture of a bound model, with a skeleton if its parts can be shared."""
    by_memory = {(t.data_ptr(), tuple(t.shape), t.dtype): name for name, t in tensors.items() if t.numel()}
    names: dict[str, str] = {}
    memo: dict[int, Any] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        tensor = by_memory.get((parameter.data_ptr(), tuple(parameter.shape), parameter.dtype))
        if tensor is None or not parameter.is_contiguous():
            return Architecture(None, {})  # converted, or a part of a tensor
        names[name] = tensor
        memo.setdefault(id(parameter), nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=False))
    for buffer in model.buffers():
        if segment.holds(buffer):
            return Architecture(None, {})
        memo[id(buffer)] = buffer  # computed from the configuration, and never written
    return Architecture(copy.deepcopy(model, memo), names)


def _fill(skeleton: PreTrainedModel, names: dict[str, str], tensors: dict[str, torch.Tensor]) -> PreTrainedModel:
    """Return a copy of the skeleton with the parameters `tensors`."""
    memo: dict[int, Any] = {id(buffer): buffer for buffer in skeleton.buffers()}
    by_tensor: dict[str, nn.Parameter] = {}
    for name, parameter in skeleton.named_parameters(remove_duplicate=False):
        tensor = names[name]
        if tensor not in by_tensor:  # tied parameters remain one
            by_tensor[tensor] = nn.Parameter(tensors[tensor], requires_grad=False)
        memo[id(parameter)] = by_tensor[tensor]
    return copy_modules(skeleton, memo)
