"""LoRA adapters in PEFT's layout with random weights, and merged reference models."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from shared.contracts.models import ModelCard, ModelSpec
from tests.support.sources import inspected

LLAMA_TARGETS = ("q_proj", "v_proj", "down_proj")


def linear_modules(base: Path, targets: Sequence[str], *, transposed: bool = False) -> dict[str, tuple[int, int]]:
    """Return outputs and inputs of the linear layers by module.

    Args:
        base: A directory of safetensors.
        targets: Names of the layers.
    """
    found = {}
    for file in sorted(base.glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            module = name.removesuffix(".weight")
            if tensor.dim() == 2 and module.rsplit(".", 1)[-1] in targets:
                rows, columns = tensor.shape
                found[module] = (columns, rows) if transposed else (rows, columns)
    assert found
    return found


def write_adapter(
    directory: Path,
    base: Path,
    *,
    targets: Sequence[str] = LLAMA_TARGETS,
    rank: int = 4,
    alpha: float = 8,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    transposed: bool = False,
    strength: float = 0.3,
    modules: Mapping[str, tuple[int, int]] | None = None,
    **config: Any,
) -> Path:
    """Write an adapter of `base`.

    Args:
        strength: Standard deviation of its weights; large enough to change every response.
    """
    random = torch.Generator().manual_seed(seed)
    tensors = {}
    ranks = config.get("rank_pattern") or {}
    for module, (outputs, inputs) in (modules or linear_modules(base, targets, transposed=transposed)).items():
        r = next((n for end, n in ranks.items() if module.endswith(end)), rank)
        name = f"base_model.model.{module}"
        tensors[f"{name}.lora_A.weight"] = (torch.randn(r, inputs, generator=random) * strength).to(dtype)
        tensors[f"{name}.lora_B.weight"] = (torch.randn(outputs, r, generator=random) * strength).to(dtype)
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / "adapter_model.safetensors", {"format": "pt"})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "org/base",
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": list(targets),
        "bias": "none",
        "fan_in_fan_out": transposed,
        "modules_to_save": None,
        "use_rslora": False,
        "use_dora": False,
        "init_lora_weights": True,
        **config,
    }
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory


def adapter_card(directory: Path, name: str = "a", base: str = "demo") -> ModelCard:
    """Build the card of an adapter, as the scheduler does."""
    info = inspected(directory)
    return ModelCard(spec=ModelSpec(name=name, source=str(directory), base=base), info=info, created=0)


@torch.no_grad()
def merge(model: torch.nn.Module, adapter: Path) -> None:
    """Add the adapter's products to the weights of `model`."""
    config = json.loads((adapter / "adapter_config.json").read_text())
    tensors = load_file(adapter / "adapter_model.safetensors")
    for name, a in tensors.items():
        if (found := re.fullmatch(r"base_model\.model\.(.+)\.lora_A\.weight", name)) is None:
            continue
        b = tensors[name.replace("lora_A", "lora_B")]
        alpha = next((v for k, v in config.get("alpha_pattern", {}).items() if found[1].endswith(k)), config["lora_alpha"])
        scale = alpha / (a.shape[0] ** (0.5 if config["use_rslora"] else 1))
        weight = model.get_submodule(found[1]).weight
        delta = (b.float() @ a.float()) * scale
        weight += (delta.T if config["fan_in_fan_out"] else delta).to(weight.dtype)
