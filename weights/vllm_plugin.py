"""vLLM's weights from Thaw's loader: `--load-format thaw` for an unmodified vLLM.

Installed beside vLLM (`pip install --no-deps thaw-mesh`), or put on its PYTHONPATH by Thaw's vLLM
driver, this registers itself through vLLM's plug-in entry point. With a node's loader, tensors are
views of its shared memory, each yielded when the watermark passes it; without one, the model's
directory is read as `thaw load` does. vLLM copies each into its own parameters, as from any other
source.

`--model-loader-extra-config '{"socket": "/…/loader.sock", "source": "hf://org/name"}'` names the
loader and the model's source as registered; the source is what vLLM calls the model by default: its
directory, or its name on the hub.

Each rank of a tensor-parallel vLLM copies only the ranges that it takes of the tensors. With
`"part": true` in that option its loader brings only its part of the weights too: for ranks on nodes
of their own (ADR 0102).
"""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shared.contracts.stages import RankOf
from weights.binding import bind
from weights.client import attach

if TYPE_CHECKING:
    import torch

LOAD_FORMAT = "thaw"
RUNTIME_LORA = "VLLM_ALLOW_RUNTIME_LORA_UPDATING"
"""Variable that is 1 where vLLM serves LoRA adapters."""
_SILENT_S = 600.0


def register() -> None:
    """vLLM calls this in each of its processes, maybe more than once."""
    from vllm.logger import init_logger  # type: ignore[import-not-found]  # there in vLLM's environment only
    from vllm.model_executor.model_loader import (  # type: ignore[import-not-found]
        _LOAD_FORMAT_TO_MODEL_LOADER,
        register_model_loader,
    )
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader  # type: ignore[import-not-found]
    from vllm.platforms import current_platform  # type: ignore[import-not-found]

    if LOAD_FORMAT in _LOAD_FORMAT_TO_MODEL_LOADER:
        return
    from weights.vllm_switch import register as register_switch

    register_switch()
    if os.environ.get(RUNTIME_LORA) == "1" and current_platform.is_cpu():
        from weights.vllm_lora import correct_rows_without_adapter

        correct_rows_without_adapter()
    logger = init_logger("vllm.thaw")

    class ThawModelLoader(DefaultModelLoader):  # type: ignore[misc]  # Any, here
        """vLLM's default loader with Thaw's tensors.

        The default loader still selects the wanted ones and checks that none is missing.
        """

        def __init__(self, load_config: Any) -> None:
            given = dict(load_config.model_loader_extra_config or {})
            self._socket: str | None = given.pop("socket", None)
            self._source: str | None = given.pop("source", None)
            self._is_part: bool = given.pop("part", False)
            plain = copy.copy(load_config)
            plain.model_loader_extra_config = given
            plain.load_format = "auto"
            super().__init__(plain)

        def download_model(self, model_config: Any) -> None:
            """The loader fetches what is remote."""

        def get_all_weights(self, model_config: Any, model: Any) -> Generator[tuple[str, torch.Tensor], None, None]:
            self.counter_before_loading_weights = began = time.perf_counter()
            count = nbytes = 0
            source = self._source or source_of(model_config.model, model_config.revision)
            rank = rank_here()
            if rank is not None and self._socket is not None:
                from weights.rank_views import Taken, rank_tensors

                taken = Taken()
                opened = rank_tensors(source, self._socket, rank, taken, is_part=self._is_part, timeout=_SILENT_S)
            else:
                taken, opened = None, weights(source, self._socket)
            with opened as coming:
                for name, tensor in coming:
                    count, nbytes = count + 1, nbytes + tensor.nbytes
                    yield name, tensor
            for secondary in getattr(model, "secondary_weights", ()):
                yield from self._get_weights_iterator(secondary)
            seconds = time.perf_counter() - began
            way = "its loader" if self._socket else "its files"
            logger.info("Thaw gave %d tensors, %.1f MiB, from %s in %.3f seconds", count, nbytes / 2**20, way, seconds)
            if rank is not None and taken is not None:
                logger.info(
                    "Rank %d of %d took %d of %d bytes; the loader brought %d bytes, %d tensors were read whole",
                    *(rank.index, rank.count, taken.nbytes, nbytes, taken.brought_bytes, taken.whole_tensors),
                )

    register_model_loader(LOAD_FORMAT)(ThawModelLoader)


def rank_here() -> RankOf | None:
    """Return the place of this process in its tensor-parallel group; None: it computes alone."""
    from vllm.distributed import (  # type: ignore[import-not-found]
        get_tensor_model_parallel_rank,
        get_tensor_model_parallel_world_size,
    )

    count = get_tensor_model_parallel_world_size()
    return RankOf(index=get_tensor_model_parallel_rank(), count=count) if count > 1 else None


def source_of(model: str, revision: str | None) -> str:
    """Return the source for vLLM's name of a model: a path of any kind, or a hub name."""
    if "://" in model:
        return model
    path = Path(model).expanduser()
    if path.exists() or path.is_absolute() or model.startswith("."):
        return str(path.resolve())
    return f"hf://{model}@{revision}" if revision else f"hf://{model}"


@contextmanager
def weights(source: str, socket: str | None) -> Iterator[Iterator[tuple[str, torch.Tensor]]]:
    """Start to read a model, and yield each tensor as soon as it is complete.

    Raises `ThawError`.

    A tensor is a view of memory that other processes may have as well: it is valid until the next
    one is asked for.
    """
    if socket is None:
        from weights.streaming import TensorStream

        with TensorStream(source) as stream:
            yield iter(stream)
        return
    with attach(socket, source=source, timeout=_SILENT_S) as held:
        yield ((e.name, bind(e.name, e.dtype, e.shape, data, e.offset)) for e, data in held.tensors())
