"""Write checkpoints in the sizes of Tangram's Table 1, divided, for the engines of bench.reuse."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from bench.papers import tangram as t
from bench.papers.constants import tangram as c
from thaw.demo.models import SIZES, make_demo_model
from weights.convert.job import convert
from weights.formats.checkpoint import open_checkpoint
from weights.formats.segment import lay_out
from weights.store.units import PAGE_BYTES, cut_units

SHAPE = replace(SIZES["test"], hidden=512, intermediate=4096, heads=8, kv_heads=4, context=512)
"""Shape of one layer, in float32: there batching does not change greedy output."""
LAYER_BYTES = 4 * (2 * 512 * 512 + 2 * 512 * 256 + 3 * 512 * 4096)
CONTEXT = SHAPE.context


def write_models(directory: Path, models: Sequence[c.Model], scale: float) -> dict[str, Path]:
    """Write converted checkpoints in the models' sizes, divided, in whole layers."""
    found = {}
    for seed, (name, model) in enumerate(zip(t.name_copies(models), models, strict=True)):
        layers = max(1, round(model.gb * 1e9 / scale / LAYER_BYTES))
        original = make_demo_model(directory / "original" / name, replace(SHAPE, layers=layers), seed)
        convert(original, directory / name)
        (original / "model.safetensors").unlink()
        found[name] = directory / name
    return found


def pages(model: Path) -> int:
    """Return the pages of a device that the model's units fill."""
    return sum(u.pages for u in cut_units(lay_out(open_checkpoint(model), "").tensors, {}, ""))


def device_bytes(models: Sequence[Path]) -> int:
    """Return the device on which the largest model fills as much as the paper's largest does."""
    largest = max(m.gb for m in c.MODELS)
    return round(max(map(pages, models)) * c.DEVICE_GB.value / largest) * PAGE_BYTES
