"""Plan which tensors tensor parallelism divides, and how.

The plan is that of transformers for the architecture.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shared.dtypes import DTYPE_BITS
from shared.errors import CheckpointInvalid, UnsupportedArchitecture
from weights.convert.tensor import Split
from weights.formats.checkpoint import parse_json, read_small
from weights.formats.root import mode_of

_COLUMNS = frozenset({"colwise", "colwise_gather_output", "colwise_rep"})
_ROWS = frozenset({"rowwise", "rowwise_split_input", "rowwise_rep"})
_WHOLE = frozenset(
    {
        "all_reduce",
        "local_params",
        "mla_kv_a_proj",
        "moe_identity_expert",
        "moe_tp_experts",
        "replicate",
        "replicated_with_grad_allreduce",
        "sequence_parallel",
    }
)
_FUSED_EXPERTS = re.compile(r"(?P<experts>.*\.experts)\.(?P<part>gate_up_proj|down_proj)")
_HEADS = ("num_attention_heads", "num_key_value_heads")


@dataclass(frozen=True)
class Plan:
    """The way to divide a model's tensors.

    Attributes:
        styles: Patterns of tensor names, and the style of each in
            transformers.distributed.tensor_parallel.
    """

    ranks: int
    styles: tuple[tuple[re.Pattern[str], str], ...] = ()

    def split(self, name: str, dtype: str, shape: tuple[int, ...]) -> Split | None:
        """Return how the tensor is divided; None: every rank has all of it.

        Raises:
            CheckpointInvalid: It cannot be divided.
            UnsupportedArchitecture: The plan does not cover it.
        """
        if self.ranks == 1:
            return None
        style = next((s for pattern, s in self.styles if pattern.fullmatch(name)), None)
        if style is None:
            if ".experts." in name:
                raise UnsupportedArchitecture(
                    f"transformers' tensor-parallel plan does not say how to divide {name}; convert without it"
                )
            return None
        split = _split(name, style, len(shape))
        if split is not None:
            self._check(name, dtype, shape, split)
        return split

    def _check(self, name: str, dtype: str, shape: tuple[int, ...], split: Split) -> None:
        length, parts = shape[split.dim], split.blocks * self.ranks
        run = DTYPE_BITS[dtype]
        for n in shape[split.dim + 1 :]:
            run *= n
        if length % parts or length // parts * run % 8:
            raise CheckpointInvalid(
                f"Tensor {name!r} of shape {list(shape)} cannot be divided evenly by {self.ranks} along its dimension {split.dim}; choose "
                "another --tensor-parallel"
            )


def _split(name: str, style: str, dimensions: int) -> Split | None:
    """Divide a tensor as the style's `shard_param` does."""
    bias = name.endswith("bias")
    if style in _WHOLE or (style in _ROWS and bias) or (style == "packed_rowwise" and dimensions == 1):
        return None
    if dimensions == 0 or (style == "packed_colwise" and dimensions == 1):
        raise UnsupportedArchitecture(
            f"Tensor {name!r} has too few dimensions to be divided {style}; convert without --tensor-parallel"
        )
    if style in _COLUMNS:
        return Split(max(0, dimensions - 2))
    if style in _ROWS:
        return Split(dimensions - 1)
    if style == "packed_colwise":
        return Split(dimensions - 2, blocks=2)
    if style == "packed_rowwise":
        return Split(dimensions - 1, blocks=2)
    if style in ("embedding_rowwise", "embedding_colwise") and dimensions == 2:
        return Split(0 if style == "embedding_rowwise" else 1)
    raise UnsupportedArchitecture(
        f"transformers divides {name} {style}, which is not known here; convert without --tensor-parallel"
    )


def plan_for(directory: Path | None, ranks: int) -> Plan:
    """The plan of the model in `directory`.

    Raises `UnsupportedArchitecture` if transformers has none, `CheckpointInvalid` if it is for
    heads that cannot be divided by `ranks`.
    """
    if ranks == 1:
        return Plan(1)
    if directory is None or mode_of(directory / "config.json") is None:
        raise UnsupportedArchitecture(
            "--tensor-parallel needs a model directory with its config.json: the architecture says what is divided"
        )
    config, classes = _transformers(directory)
    if getattr(config, "quantization_config", None) is not None:
        raise UnsupportedArchitecture(f"{directory}: quantised models are not divided; convert without --tensor-parallel")
    text = config.get_text_config()
    base: Mapping[str, str] = getattr(text, "base_model_tp_plan", None) or {}
    if not base:
        raise UnsupportedArchitecture(
            f"transformers has no tensor-parallel plan for {text.model_type}; convert without --tensor-parallel"
        )
    styles = [(_pattern(key, inner=True), style) for key, style in (*base.items(), *_single_experts(base))]
    styles += [(_pattern(key), style) for cls in classes for key, style in (getattr(cls, "_tp_plan", None) or {}).items()]
    if any(style == "colwise" and key.endswith(("k_proj", "qkv_proj", "query_key_value")) for key, style in base.items()):
        _check_heads(directory, text, ranks)
    return Plan(ranks, tuple(styles))


def _transformers(directory: Path) -> tuple[Any, list[type[Any]]]:
    """Return the configuration, and the model's class if transformers has one.

    The class is needed because the model's head has a plan of its own.
    """
    import transformers
    from huggingface_hub.errors import StrictDataclassError

    raw = parse_json(read_small(directory / "config.json"), str(directory / "config.json"))
    try:
        config = transformers.AutoConfig.from_pretrained(directory, trust_remote_code=False, local_files_only=True)
        names = raw.get("architectures")
        found = [getattr(transformers, n, None) for n in names if isinstance(n, str)] if isinstance(names, list) else []
    except (AttributeError, ImportError, KeyError, OSError, RuntimeError, StrictDataclassError, TypeError, ValueError) as e:
        raise UnsupportedArchitecture(f"transformers cannot read {directory}/config.json ({type(e).__name__}: {e!s:.200})") from e
    return config, [c for c in found if isinstance(c, type)]


def _pattern(key: str, *, inner: bool = False) -> re.Pattern[str]:
    """Compile a pattern that matches names of tensors.

    Args:
        inner: Match tensors of the base model, which may be inside another model.
    """
    prefix = r"(model\.language_model\.|language_model\.model\.|model\.|transformer\.)?" if inner else ""
    return re.compile(prefix + re.escape(key).replace(r"\*", r"\d+") + r"(\.weight|\.bias)?")


def _single_experts(plan: Mapping[str, str]) -> list[tuple[str, str]]:
    """Derive the plan of single experts from the plan of fused experts.

    transformers fuses experts in memory; most checkpoints store them one by one.
    """
    found = []
    for key, style in plan.items():
        match = _FUSED_EXPERTS.fullmatch(key)
        if match is None or style not in ("packed_colwise", "rowwise"):
            continue
        if match["part"] == "down_proj":
            found.append((f"{match['experts']}.*.down_proj", "rowwise"))
        else:
            found += [(f"{match['experts']}.*.{part}", "colwise") for part in ("gate_proj", "up_proj")]
    return found


def _check_heads(directory: Path, config: Any, ranks: int) -> None:
    for key in _HEADS:
        heads = getattr(config, key, None)
        if isinstance(heads, int) and heads % ranks:
            raise CheckpointInvalid(
                f"{directory} has {key} = {heads}, which cannot be divided by {ranks}; choose another --tensor-parallel"
            )
