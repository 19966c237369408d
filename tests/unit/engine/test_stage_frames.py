"""Frames and proofs between stages, hostile bytes included."""

from __future__ import annotations

import struct

import pytest

from services.engine.domain.frames import (
    HEADER_BYTES,
    MAX_MESSAGE_BYTES,
    ProtocolError,
    decode_header,
    decode_message,
    encode_head,
)
from services.engine.domain.micro_batches import LEAST_TOKENS, split_rows
from services.engine.domain.stage_frames import STAGES, is_proven, prove
from shared.contracts.stages import GroupCapacity, LayerRange, Stage, StageRelease, StageRow, StageStep, split_layers

NONCES = b"a" * 32, b"b" * 32
STAGE = Stage(group_id="g", index=1, count=3, layers=LayerRange(first=2, end=4, total=6), secret="s" * 32)


def test_frame_is_read_as_it_was_written() -> None:
    step = StageStep(number=7, rows=(StageRow(sequence=1, start=0, count=5), StageRow(sequence=2, start=9, count=1)))
    head = encode_head(STAGES, step, 1234)
    lengths = decode_header(STAGES, head[:HEADER_BYTES], 1234)
    assert (lengths.message, lengths.data) == (len(head) - HEADER_BYTES, 1234)
    assert decode_message(STAGES, head[HEADER_BYTES:]) == step


@pytest.mark.parametrize(
    ("header", "match"),
    [
        (b"HTTP/1.1 200", "no|not carry"),
        (struct.pack(">2sBBII", b"TS", 2, 0, 10, 0), "version 2"),
        (struct.pack(">2sBBII", b"TS", 1, 9, 10, 0), "not carry"),
        (struct.pack(">2sBBII", b"TS", 1, 0, 0, 0), "out of bounds"),
        (struct.pack(">2sBBII", b"TS", 1, 0, MAX_MESSAGE_BYTES + 1, 0), "out of bounds"),
        (struct.pack(">2sBBII", b"TS", 1, 0, 10, 1001), "at most 1000"),
    ],
)
def test_header_out_of_bounds_is_refused(header: bytes, match: str) -> None:
    with pytest.raises(ProtocolError, match=match):
        decode_header(STAGES, header, 1000)


@pytest.mark.parametrize(
    "body",
    [b"", b"{}", b"\xff\xfe", b'{"kind":"step","number":0,"rows":[]}', b'{"kind":"step","number":-1,"rows":[{"sequence":0}]}'],
)
def test_malformed_message_is_refused(body: bytes) -> None:
    with pytest.raises(ProtocolError, match="invalid"):
        decode_message(STAGES, body)


def test_message_longer_than_a_frame_is_not_sent() -> None:
    with pytest.raises(ProtocolError, match="longer"):
        encode_head(STAGES, StageRelease(sequences=tuple(range(10**6))), 0)


def test_proof_is_bound_to_secret_group_role_edge_and_nonces() -> None:
    proof = prove("caller", STAGE, 0, NONCES)
    assert is_proven(proof, "caller", STAGE, 0, NONCES)
    others = [STAGE.model_copy(update=change) for change in ({"secret": "t" * 32}, {"group_id": "h"}, {"count": 4})]
    assert not any(is_proven(proof, "caller", other, 0, NONCES) for other in others)
    assert not is_proven(proof, "listener", STAGE, 0, NONCES)
    assert not is_proven(proof, "caller", STAGE, 1, NONCES)
    assert not is_proven(proof, "caller", STAGE, 0, (NONCES[1], NONCES[0]))


def test_a_secret_is_not_shown() -> None:
    assert STAGE.secret not in repr(STAGE)


@pytest.mark.parametrize(("total", "stages"), [(1, 1), (3, 2), (11, 4), (32, 4), (7, 7)])
def test_layers_are_divided_evenly_and_completely(total: int, stages: int) -> None:
    ranges = split_layers(total, stages)
    assert [i for r in ranges for i in range(r.first, r.end)] == list(range(total))
    assert max(r.count for r in ranges) - min(r.count for r in ranges) <= 1
    assert [r.is_first for r in ranges] == [True, *[False] * (stages - 1)]
    assert [r.is_last for r in ranges] == [*[False] * (stages - 1), True]


def test_fewer_layers_than_stages_cannot_be_divided() -> None:
    with pytest.raises(ValueError, match="2 layers"):
        split_layers(2, 3)


def test_stage_has_the_layers_of_its_place() -> None:
    with pytest.raises(ValueError, match="first stage"):
        Stage(group_id="g", index=0, count=2, layers=LayerRange(first=1, end=2, total=3), secret="s" * 32)


@pytest.mark.parametrize(
    ("counts", "stages", "expected"),
    [
        ([1], 4, ((0, 1),)),
        ([1] * 8, 4, ((0, 8),)),
        ([4 * LEAST_TOKENS], 4, ((0, 1),)),
        ([LEAST_TOKENS] * 4, 4, ((0, 1), (1, 2), (2, 3), (3, 4))),
        ([LEAST_TOKENS] * 4, 2, ((0, 2), (2, 4))),
        ([1, 1, 3 * LEAST_TOKENS], 3, ((0, 3),)),
        ([3 * LEAST_TOKENS, 1, 1], 3, ((0, 1), (1, 3))),
    ],
)
def test_only_large_steps_are_divided_and_never_within_a_row(
    counts: list[int], stages: int, expected: tuple[tuple[int, int], ...]
) -> None:
    assert split_rows(counts, stages) == expected


def test_capacity_is_a_message() -> None:
    assert decode_message(STAGES, GroupCapacity(kv_blocks=3).model_dump_json().encode()) == GroupCapacity(kv_blocks=3)
