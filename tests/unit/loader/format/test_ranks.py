"""The part of a checkpoint that a rank of a tensor-parallel engine needs."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.contracts.segment import PAGE
from shared.contracts.stages import RankOf, part_id, split_layers, weights_of
from tests.unit.loader.checkpoints import write_checkpoint
from weights.formats.checkpoint import Checkpoint, open_checkpoint
from weights.formats.ranks import DIVIDED, VOCABULARY_PADDING, rows_of_rank
from weights.formats.safetensors import TensorEntry
from weights.formats.segment import Layout, lay_out
from weights.transfer.pieces import cut

HIDDEN, HEADS, KV_HEADS, HEAD, VOCABULARY = 128, 8, 4, 32, 1000
CONFIG = {"model_type": "llama", "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS}
SHAPES: dict[str, tuple[int, ...]] = {
    "model.embed_tokens.weight": (VOCABULARY, HIDDEN),
    "model.layers.0.self_attn.q_proj.weight": (HEADS * HEAD, HIDDEN),
    "model.layers.0.self_attn.k_proj.weight": (KV_HEADS * HEAD, HIDDEN),
    "model.layers.0.self_attn.v_proj.weight": (KV_HEADS * HEAD, HIDDEN),
    "model.layers.0.self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD),
    "model.layers.0.mlp.gate_proj.weight": (384, HIDDEN),
    "model.layers.0.mlp.up_proj.weight": (384, HIDDEN),
    "model.layers.0.mlp.down_proj.weight": (HIDDEN, 384),
    "model.layers.0.input_layernorm.weight": (HIDDEN,),
    "model.norm.weight": (HIDDEN,),
    "lm_head.weight": (VOCABULARY, HIDDEN),
}
DIVIDED_NAMES = {
    n for n in SHAPES if n.split(".")[-2] in ("embed_tokens", "q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "lm_head")
}


def write(directory: Path, *, shards: int = 1) -> dict[str, np.ndarray]:
    random = np.random.default_rng(1)
    return write_checkpoint(directory, {n: random.standard_normal(s, dtype=np.float32) for n, s in SHAPES.items()}, shards=shards)


def tensors_of(checkpoint: Checkpoint) -> list[TensorEntry]:
    return [t for f in checkpoint.files for t in f.header.tensors]


def lay_out_rank(checkpoint: Checkpoint, rank: RankOf, config: dict[str, Any] = CONFIG) -> Layout:
    return lay_out(checkpoint, "w", None, rows_of_rank(tensors_of(checkpoint), config, rank))


def filled(layout: Layout) -> bytes:
    """Return the segment as a loader fills it."""
    data = bytearray(layout.total_bytes)
    data[: len(layout.head)] = layout.head
    for piece in cut(layout):
        assert piece.target % PAGE == piece.offset % PAGE == 0
        content = layout.places[piece.file].file.path.read_bytes()
        data[piece.target : piece.target + piece.length] = content[piece.offset : piece.offset + piece.length]
    return bytes(data)


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("count", [2, 4])
def test_ranks_have_every_row_and_the_divided_ones_once(tmp_path: Path, shards: int, count: int) -> None:
    weights = write(tmp_path, shards=shards)
    checkpoint = open_checkpoint(tmp_path)
    found: dict[str, list[tuple[int, np.ndarray]]] = {n: [] for n in SHAPES}
    for index in range(count):
        layout = lay_out_rank(checkpoint, RankOf(index=index, count=count))
        data = filled(layout)
        assert {t.name for t in layout.tensors} == set(SHAPES)
        for t in layout.tensors:
            there = np.frombuffer(data[t.offset : t.offset + t.nbytes], np.float32).reshape(t.shape)
            assert (t.cut is not None) == (t.name in DIVIDED_NAMES)
            if t.cut is None:
                assert (there == weights[t.name]).all()
            else:
                assert (t.cut.dim, t.cut.length) == (0, SHAPES[t.name][0])
                found[t.name].append((t.cut.start, there))
    for name in DIVIDED_NAMES:
        whole = np.concatenate([rows for _, rows in sorted(found[name], key=lambda x: x[0])])
        assert (whole == weights[name]).all(), name


def test_part_has_half_of_the_divided_bytes_and_all_others(tmp_path: Path) -> None:
    weights = write(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    divided = sum(weights[n].nbytes for n in DIVIDED_NAMES)
    others = sum(w.nbytes for n, w in weights.items() if n not in DIVIDED_NAMES)
    layout = lay_out_rank(checkpoint, RankOf(index=0, count=2))
    data_bytes = layout.total_bytes - len(layout.head)
    padding = VOCABULARY_PADDING * HIDDEN * 4 * 2 + 2 * PAGE * len(SHAPES)
    assert 0 <= data_bytes - (divided // 2 + others) <= padding


def test_segment_of_whole_weights_is_as_before(tmp_path: Path) -> None:
    """Its size is that of the registration: the index does not name cuts."""
    write(tmp_path)
    assert b"cut" not in lay_out(open_checkpoint(tmp_path), "w").head


def test_rank_of_a_stage_has_its_layers_only(tmp_path: Path) -> None:
    write(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    rows = rows_of_rank(tensors_of(checkpoint), CONFIG, RankOf(index=1, count=2))
    layout = lay_out(checkpoint, "w", split_layers(1, 1)[0], rows)
    assert {t.name for t in layout.tensors if t.cut} == DIVIDED_NAMES


@pytest.mark.parametrize(
    "config",
    [
        {},
        {**CONFIG, "model_type": "never-heard-of"},
        {**CONFIG, "quantization_config": {"quant_method": "awq"}},
    ],
)
def test_unknown_models_are_not_divided(tmp_path: Path, config: dict[str, Any]) -> None:
    weights = write(tmp_path)
    layout = lay_out_rank(open_checkpoint(tmp_path), RankOf(index=1, count=2), config)
    assert not [t for t in layout.tensors if t.cut]
    assert sum(t.nbytes for t in layout.tensors) == sum(w.nbytes for w in weights.values())


@given(
    model_type=st.sampled_from(sorted(DIVIDED)),
    heads=st.integers(1, 16),
    kv_heads=st.integers(1, 16),
    rows=st.integers(1, 5000),
    count=st.integers(2, 8),
)
def test_rows_of_all_ranks_are_all_rows(model_type: str, heads: int, kv_heads: int, rows: int, count: int) -> None:
    """No row is missing, and rows are shared only where ranks share a head of keys and values."""
    config = {"model_type": model_type, "num_attention_heads": heads, "num_key_value_heads": kv_heads}
    shapes = {
        "model.embed_tokens.weight": (rows, 64),
        "model.layers.3.self_attn.q_proj.weight": (heads * 64, 64),
        "model.layers.3.self_attn.k_proj.weight": (kv_heads * 64, 64),
        "model.layers.3.mlp.up_proj.weight": (rows, 64),
        "model.layers.3.mlp.experts.0.up_proj.weight": (rows, 64),
    }
    tensors = [TensorEntry(n, "F32", s, 0, s[0] * s[1] * 4) for n, s in shapes.items()]
    ranks = [rows_of_rank(tensors, config, RankOf(index=i, count=count)) for i in range(count)]
    for name, (total, _) in shapes.items():
        parts = [r.get(name, range(total)) for r in ranks]
        assert {row for part in parts for row in part} == set(range(total))
        if any(name in r for r in ranks) and "k_proj" not in name:
            cut_parts = [r[name] for r in ranks if name in r]
            assert all(a.stop == b.start for a, b in pairwise(cut_parts))
    assert not any("experts" in name for r in ranks for name in r)


def test_ranks_share_a_head_of_keys_and_values() -> None:
    tensor = TensorEntry("model.layers.0.self_attn.k_proj.weight", "F32", (256, 128), 0, 256 * 128 * 4)
    config = {**CONFIG, "num_key_value_heads": 2}
    found = [rows_of_rank([tensor], config, RankOf(index=i, count=4))[tensor.name] for i in range(4)]
    assert found == [range(128), range(128), range(128, 256), range(128, 256)]


def test_ids_of_parts_name_their_weights() -> None:
    [layers, _] = split_layers(4, 2)
    ids = [part_id("r1", at, rank) for at in (None, layers) for rank in (None, RankOf(index=0, count=2), RankOf(index=1, count=2))]
    assert len(set(ids)) == len(ids)
    assert {weights_of(i) for i in ids} == {"r1"}
