"""Benchmark of layouts: all hold the same model, all loads read the same bytes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from bench.convert import CONFIG, LOADS, convert, one_load, pickle_of, show, unalign
from tests.unit.loader.checkpoints import write_small_files
from weights.formats.checkpoint import open_checkpoint

HIDDEN = 64


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("layouts")
    write_small_files(root / "aligned", CONFIG)
    layer = {
        "self_attn.q_proj": (HIDDEN, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HIDDEN),
        "mlp.down_proj": (HIDDEN, 2 * HIDDEN),
        "input_layernorm": (HIDDEN,),
    }
    weights = {f"model.layers.0.{name}.weight": torch.randn(shape).to(torch.bfloat16) for name, shape in layer.items()}
    weights["lm_head.weight"] = torch.randn(4 * HIDDEN, HIDDEN).to(torch.bfloat16)
    name = "model-00001-of-00001.safetensors"
    save_file(weights, root / "aligned" / name)
    (root / "aligned" / "model.safetensors.index.json").write_text(
        '{"weight_map": {' + ", ".join(f'"{tensor}": "{name}"' for tensor in weights) + "}}"
    )
    unalign(root / "aligned", root / "unaligned")
    pickle_of(root / "aligned", root / "pickled")
    convert(root / "pickled", root / "converted", "--verify")
    convert(root / "aligned", root / "divided", "--tensor-parallel", "2")
    return root


def test_layouts_have_the_alignment_of_their_name(root: Path) -> None:
    odd = {t.offset % 2 for f in open_checkpoint(root / "unaligned").files for t in f.header.tensors}
    even = {t.offset % 2 for f in open_checkpoint(root / "aligned").files for t in f.header.tensors}
    assert (odd, even) == ({1}, {0})


def test_every_load_reads_the_same_bytes(root: Path) -> None:
    samples = {name: [one_load(name, root)] for name in LOADS}
    names = list(LOADS)
    assert len({samples[n][0]["checksum"] for n in names[:4]}) == 1
    assert len({samples[n][0]["checksum"] for n in names[4:]}) == 1
    figures = show("load", samples, "bytes")
    assert figures["load.converted.gb_per_s"] > 0
