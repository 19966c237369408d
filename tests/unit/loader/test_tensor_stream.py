"""`TensorStream` yields tensors while the rest is being read.

Cancelled and failed loads end, and keep no memory.
"""

from __future__ import annotations

import gc
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shared.errors import CheckpointInvalid
from tests.unit.loader.checkpoints import tensors, write_checkpoint
from tests.unit.loader.shared_mappings import mappings
from weights import streaming
from weights.streaming import TensorStream
from weights.transfer.fill import Filling
from weights.transfer.pieces import Piece
from weights.transfer.reader import FilesReader, ReadOptions

WITHIN_S = 60.0


class Held:
    """Reads the first `open_pieces` pieces, and the others on release."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, open_pieces: int = 1) -> None:
        self.go, self.begun = threading.Event(), threading.Event()
        self.read: list[int] = []
        plain = FilesReader.read

        def read(reader: FilesReader, piece: Piece) -> None:
            if piece.index >= open_pieces:
                assert self.go.wait(WITHIN_S)
            self.read.append(piece.index)
            self.begun.set()
            plain(reader, piece)

        monkeypatch.setattr(FilesReader, "read", read)


def test_stream_yields_the_same_tensors_as_a_full_load(tmp_path: Path) -> None:
    weights = write_checkpoint(tmp_path, tensors(megabytes=40), shards=3)
    found = dict(TensorStream(tmp_path))
    assert found.keys() == weights.keys()
    for name, value in weights.items():
        assert np.array_equal(found[name].numpy(), value)


def test_the_first_tensors_arrive_while_the_rest_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = write_checkpoint(tmp_path, tensors(megabytes=40), shards=2)
    held = Held(monkeypatch)
    stream = TensorStream(tmp_path)
    assert held.begun.wait(WITHIN_S), "before anybody asks for one"
    coming = iter(stream)
    name, first = next(coming)
    assert np.array_equal(first.numpy(), weights[name])
    assert held.read == [0]
    held.go.set()
    rest = dict(coming)
    assert {name, *rest} == {*weights}
    for name, value in rest.items():
        assert np.array_equal(value.numpy(), weights[name])


def test_leaving_the_stream_early_ends_the_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_checkpoint(tmp_path, tensors(megabytes=80), shards=2)
    gc.collect()
    before, threads = mappings(), set(threading.enumerate())
    held = Held(monkeypatch)

    def filling(*given: Any, cancelled: threading.Event, **more: Any) -> Filling:
        held.go = cancelled
        return Filling(*given, cancelled=cancelled, **more)

    monkeypatch.setattr(streaming, "Filling", filling)
    with TensorStream(tmp_path, ReadOptions(threads=1)) as coming:
        next(iter(coming))
    assert held.read == [0, 1], "what is being read is read to its end, and nothing else is begun"
    gc.collect()
    assert mappings() == before
    assert set(threading.enumerate()) <= threads


def test_failure_during_the_stream_is_raised_and_keeps_no_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_checkpoint(tmp_path, tensors(megabytes=40), shards=2)
    gc.collect()
    before = mappings()
    plain, calls = os.preadv, iter(range(10**6))

    def fail(*given: Any) -> int:
        if next(calls) >= 1:
            raise OSError(5, "Input/output error")
        return plain(*given)

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(CheckpointInvalid, match="Input/output error"):
        for _ in TensorStream(tmp_path, ReadOptions(threads=1)):
            pass
    gc.collect()
    assert mappings() == before


def test_a_missing_tensor_is_reported_at_the_first_step(tmp_path: Path) -> None:
    with pytest.raises(CheckpointInvalid, match="does not exist"):
        next(iter(TensorStream(tmp_path / "nothing")))
