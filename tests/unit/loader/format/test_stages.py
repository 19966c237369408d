"""The part of a checkpoint that a pipeline stage needs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from shared.contracts.segment import PAGE
from shared.contracts.stages import LayerRange, split_layers
from shared.errors import CheckpointInvalid
from tests.unit.loader.checkpoints import write_checkpoint
from weights.formats.checkpoint import open_checkpoint
from weights.formats.segment import lay_out
from weights.formats.stages import layer_sizes, names_of_stage
from weights.transfer.pieces import cut

NAMES = (
    "model.embed_tokens.weight",
    *(f"model.layers.{i}.{part}.weight" for i in range(4) for part in ("input_layernorm", "self_attn.q_proj", "mlp.up_proj")),
    "model.norm.weight",
    "lm_head.weight",
)


def write(directory: Path, *, shards: int = 1, tied: bool = False) -> dict[str, np.ndarray]:
    random = np.random.default_rng(1)
    found = {n: random.standard_normal((100 + 37 * i, 21), dtype=np.float32) for i, n in enumerate(NAMES)}
    if tied:
        del found["lm_head.weight"]
    return write_checkpoint(directory, found, shards=shards)


def test_stages_share_out_all_tensors_and_only_the_head_is_where_it_belongs() -> None:
    parts = [names_of_stage(NAMES, layers) for layers in split_layers(4, 4)]
    assert sum(map(len, parts)) == len(NAMES)
    assert frozenset().union(*parts) == set(NAMES)
    assert "model.embed_tokens.weight" in parts[0]
    assert {"model.norm.weight", "lm_head.weight"} <= parts[3]


def test_last_stage_of_a_tied_model_has_the_embeddings_too() -> None:
    names = [n for n in NAMES if n != "lm_head.weight"]
    first, middle, last = (names_of_stage(names, layers) for layers in split_layers(4, 3))
    assert "model.embed_tokens.weight" in first & last
    assert "model.embed_tokens.weight" not in middle


@pytest.mark.parametrize("total", [3, 5])
def test_other_numbers_of_layers_are_refused(total: int) -> None:
    with pytest.raises(CheckpointInvalid, match="4 layers"):
        names_of_stage(NAMES, LayerRange(first=0, end=1, total=total))


@pytest.mark.parametrize("shards", [1, 3])
def test_segment_of_a_part_has_the_bytes_of_its_tensors_in_whole_pages(tmp_path: Path, shards: int) -> None:
    weights = write(tmp_path, shards=shards)
    checkpoint = open_checkpoint(tmp_path)
    whole = lay_out(checkpoint, "w")
    for layers in split_layers(4, 2):
        layout = lay_out(checkpoint, "w", layers)
        data = bytearray(layout.total_bytes)
        data[: len(layout.head)] = layout.head
        for piece in cut(layout):
            place = layout.places[piece.file]
            assert piece.target % PAGE == piece.offset % PAGE == 0
            content = place.file.path.read_bytes()
            data[piece.target : piece.target + piece.length] = content[piece.offset : piece.offset + piece.length]
        assert {t.name for t in layout.tensors} == names_of_stage(NAMES, layers)
        for t in layout.tensors:
            assert bytes(data[t.offset : t.offset + t.nbytes]) == weights[t.name].tobytes()
        assert layout.total_bytes < whole.total_bytes


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("stages", [1, 2, 4])
def test_layer_sizes_bound_the_segments_of_all_stages(tmp_path: Path, stages: int, tied: bool) -> None:
    write(tmp_path, shards=2, tied=tied)
    checkpoint = open_checkpoint(tmp_path)
    whole = lay_out(checkpoint, "w")
    sizes = layer_sizes([t for f in checkpoint.files for t in f.header.tensors], len(whole.head))
    assert sizes is not None
    assert sizes.count == 4
    for layers in split_layers(4, stages):
        assert lay_out(checkpoint, "w", layers).total_bytes <= sizes.bytes_of(layers)


def test_model_without_numbered_layers_has_no_sizes(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, {"embed.weight": np.zeros((4, 4), np.float32), "norm.weight": np.zeros(4, np.float32)})
    checkpoint = open_checkpoint(tmp_path)
    assert layer_sizes([t for f in checkpoint.files for t in f.header.tensors], 0) is None
