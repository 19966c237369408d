"""Keys and values of a group arrive in parts: a token counts when all its layers are there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from services.engine.domain.frames import ProtocolError
from services.engine.domain.kv_pieces import Piece
from services.engine.generation.kv_bytes import layout_of, read_piece, write_piece
from services.engine.generation.kv_cache import SequenceKV
from services.engine.kv_transfer.arrivals import NotTransferred, match_parts
from services.engine.stages.tensors import tokens_from_bytes, tokens_to_bytes
from shared.contracts.kv_transfer import KvOffer
from shared.contracts.stages import STAGE_MESSAGE, GroupCapacity
from shared.errors import NotFound
from tests.unit.engine.received_kv import CPU, HEADS, LAYERS, SIZE, Receiving, offer, sequence


def test_parts_of_an_offer_are_one_layout() -> None:
    own = layout_of(sequence(1))
    assert own == offer(LAYERS).layout
    assert [s.layout for s in match_parts(own, offer(LAYERS))] == [own]
    selected = match_parts(own, made := offer(1, 2, 1))
    assert [(s.layout, s.first_layer, s.layer_count) for s in selected] == [(part.layout, 0, None) for part in made.parts]
    assert offer(1, 2, 1).token_bytes == offer(LAYERS).token_bytes == LAYERS * 2 * HEADS * SIZE * 4


def test_previous_version_sees_an_offer_of_other_layers() -> None:
    """It ignores `later`, and its destination refuses a layout that is not its own."""
    seen = KvOffer.model_validate({k: v for k, v in offer(1, 3).model_dump().items() if k != "later"})
    assert seen.parts == (seen,)
    with pytest.raises(NotTransferred, match="layers"):
        match_parts(layout_of(sequence(1)), seen)


def test_part_that_stores_keys_and_values_otherwise_is_refused() -> None:
    made = offer(2, 2)
    other = made.later[0].layout.model_copy(update={"dtype": "bfloat16", "itemsize": 2})
    mixed = made.model_copy(update={"later": (made.later[0].model_copy(update={"layout": other}),)})
    for wrong, reason in ((mixed, "dtype"), (offer(2, 1), "layers"), (offer(2, 3), "layers")):
        with pytest.raises(NotTransferred, match=reason):
            match_parts(layout_of(sequence(1)), wrong)


def test_stage_of_the_previous_version_is_not_sent_a_permission() -> None:
    assert STAGE_MESSAGE.validate_json('{"kind": "capacity", "kv_blocks": 3}') == GroupCapacity(kv_blocks=3, sends_kv=False)


@given(st.lists(st.integers(0, 2**32 - 1), max_size=50))
def test_tokens_of_a_frame_are_read_as_they_were_written(tokens: list[int]) -> None:
    assert tokens_from_bytes(tokens_to_bytes(tokens)) == tuple(tokens)


def test_tokens_that_were_cut_off_are_refused() -> None:
    with pytest.raises(ProtocolError, match="whole number"):
        tokens_from_bytes(b"12345")


ENDS = st.lists(st.integers(1, 40), min_size=1, max_size=4, unique=True).map(sorted)


@given(st.integers(1, LAYERS - 1), ENDS, ENDS, st.randoms(use_true_random=False))
def test_parts_that_arrive_in_any_order_count_up_to_the_least_of_them(
    split: int, first_ends: list[int], second_ends: list[int], random: Any
) -> None:
    made, ends = Receiving(40), {0: first_ends, split: second_ends}
    reached = dict.fromkeys(ends, 0)
    order = [0] * len(first_ends) + [split] * len(second_ends)
    random.shuffle(order)
    for first_layer in order:
        end = ends[first_layer][sum(reached[first_layer] >= e for e in ends[first_layer])]
        count = split if first_layer == 0 else LAYERS - split
        made.store(Piece(reached[first_layer], end, first_layer, count))
        reached[first_layer] = end
        assert made.computed == min(reached.values())
    part = made.prepared.find_receiving(made.number, 0)
    assert part is not None
    for layer, held in part.state.layers.items():
        end = reached[0] if layer < split else reached[split]
        assert torch.equal(held[:, :, :end], made.source.layers[layer][:, :, :end])


def test_piece_that_leaves_a_gap_in_its_layers_is_refused() -> None:
    made = Receiving(40)
    made.store(Piece(0, 10, 0, 2))
    made.store(Piece(0, 20, 2, 2))
    with pytest.raises(NotFound):
        made.store(Piece(12, 20, 0, 2))
    assert made.computed == 10


def test_layers_of_a_stage_are_written_at_their_place() -> None:
    """A stage's layers keep their numbers in the whole model."""
    stage = sequence(7, range(2, 4))
    layout = layout_of(stage)
    assert [x.layer for x in layout.layers] == [2, 3]
    copy = SequenceKV()
    write_piece(copy, Piece(0, 7, 0, 2), layout, bytearray(read_piece(stage, Piece(0, 7, 0, 2), layout)), CPU)
    assert all(torch.equal(copy.layers[i][:, :, :7], held[:, :, :7]) for i, held in stage.layers.items())
