"""Ranges of keys and values are divided without gaps, and bound to their tokens."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.engine.domain.kv_pieces import PIECE_BYTES, KvIdentity, PrefixHash, plan_pieces, pull_tokens
from services.engine.domain.step_planning import BLOCK_TOKENS
from shared.contracts.kv_transfer import KvLayer, KvLayout


def layout(*shapes: tuple[int, int], dtype: str = "float32") -> KvLayout:
    layers = tuple(KvLayer(layer=i, heads=heads, head_size=size) for i, (heads, size) in enumerate(shapes))
    return KvLayout(dtype=dtype, itemsize=4 if dtype == "float32" else 2, layers=layers)


SMALL = layout((2, 8), (2, 8))
LARGE = layout(*[(8, 128)] * 3)


@given(
    st.lists(st.tuples(st.integers(1, 8), st.sampled_from([8, 64, 128])), min_size=1, max_size=6),
    st.integers(0, 1000),
    st.integers(0, 1000),
    st.sampled_from([1, 1 << 16, PIECE_BYTES]),
)
def test_pieces_cover_every_token_of_every_layer_once_and_in_order(
    shapes: list[tuple[int, int]], start: int, count: int, piece_bytes: int
) -> None:
    made = layout(*shapes)
    token, layer, end = start, 0, None
    for piece in plan_pieces(start, start + count, made, piece_bytes):
        assert (piece.start, piece.first_layer) == (token, layer)
        assert end in (None, piece.end)
        assert piece.end % BLOCK_TOKENS == 0 or piece.end == start + count
        assert piece.layer_count == 1 or piece.size_bytes(made) <= piece_bytes
        layer = (layer + piece.layer_count) % len(shapes)
        token, end = (piece.end, None) if layer == 0 else (token, piece.end)
    assert (token, layer) == (start + count, 0)


def test_small_blocks_share_a_piece_and_large_ones_are_sent_layer_by_layer() -> None:
    assert SMALL.token_bytes == 2 * 2 * 2 * 8 * 4
    assert [p.end for p in plan_pieces(5, 5000, SMALL)] == [4096, 5000]
    assert [(p.first_layer, p.end) for p in plan_pieces(0, 200, LARGE)] == [
        (0, 128),
        (1, 128),
        (2, 128),
        (0, 200),
        (1, 200),
        (2, 200),
    ]
    assert pull_tokens(LARGE) % BLOCK_TOKENS == 0


TOKENS = tuple(range(300))
IDENTITY = KvIdentity("r", "", "", SMALL)


def test_hash_is_of_the_prefix_alone() -> None:
    one, other = PrefixHash(IDENTITY, TOKENS), PrefixHash(IDENTITY, (*TOKENS[:200], 7, 8))
    assert one.up_to(100) == other.up_to(100)
    assert one.up_to(200) == other.up_to(200) != PrefixHash(IDENTITY, TOKENS).up_to(199)
    assert one.up_to(202) != other.up_to(202)
    with pytest.raises(ValueError, match="after one of 202"):
        one.up_to(201)


@pytest.mark.parametrize(
    "other",
    [
        KvIdentity("other", "", "", SMALL),
        KvIdentity("r", "adapter", "", SMALL),
        KvIdentity("r", "", "another key", SMALL),
        KvIdentity("r", "", "", LARGE),
        KvIdentity("r", "", "", layout((2, 8), (2, 8), dtype="bfloat16")),
    ],
)
def test_hash_depends_on_the_model_the_adapter_the_key_and_the_layout(other: KvIdentity) -> None:
    assert PrefixHash(IDENTITY, TOKENS).up_to(9) != PrefixHash(other, TOKENS).up_to(9)
