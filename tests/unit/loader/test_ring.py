"""`Ring`, and tensors streamed through it: memory is reused only once it is free."""

from __future__ import annotations

import ctypes
import gc
import threading
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from shared.errors import InsufficientMemory
from tests.unit.loader.checkpoints import tensors, write_checkpoint
from weights import streaming
from weights.pool import ring as module
from weights.pool.chunks import CHUNK_BYTES
from weights.pool.ring import Ring
from weights.streaming import WINDOW_CHUNKS, TensorStream
from weights.tiers.port import Cancelled

WITHIN_S = 60.0


class Rings:
    """Records the rings that streams create."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made: list[Ring] = []

        def make(nbytes: int, window_chunks: int | None = None) -> Ring:
            self.made.append(Ring(nbytes, window_chunks))
            return self.made[-1]

        monkeypatch.setattr(streaming, "Ring", make)

    @property
    def fresh(self) -> int:
        """Return chunks that the kernel gave memory for."""
        (ring,) = self.made
        return ring.count - ring.moved_chunks


def many(megabytes: int) -> dict[str, npt.NDArray[Any]]:
    """Write tensors of 3 MB."""
    generator = np.random.default_rng(7)
    return {f"t{i:03}": generator.random((750, 1000), dtype=np.float32) for i in range(megabytes // 3)}


def entered(ring: Ring, chunk: int) -> threading.Thread:
    thread = threading.Thread(target=lambda: ring.enter(chunk * CHUNK_BYTES), daemon=True)
    thread.start()
    return thread


def test_released_chunks_are_reused_and_keep_written_bytes() -> None:
    ring = Ring(4 * CHUNK_BYTES, 2)
    for chunk in (0, 1):
        ring.enter(chunk * CHUNK_BYTES)
        ring.write(chunk * CHUNK_BYTES, bytes([chunk + 1]) * CHUNK_BYTES)
    ring.release(0)
    ring.want(CHUNK_BYTES, 2 * CHUNK_BYTES)
    ring.enter(2 * CHUNK_BYTES)
    assert ring.moved_chunks == 1
    with ring.view(CHUNK_BYTES, 1) as kept, ring.view(2 * CHUNK_BYTES, 1) as moved, ring.view(0, 1) as gone:
        assert (kept[0], moved[0], gone[0]) == (2, 1, 0), "the pages themselves went from one to the other"


def test_reader_waits_until_its_chunk_is_wanted() -> None:
    ring = Ring(4 * CHUNK_BYTES, 1)
    ring.enter(0)
    reading = entered(ring, 2)
    ring.want(CHUNK_BYTES, 2 * CHUNK_BYTES)
    ring.enter(CHUNK_BYTES)
    assert reading.is_alive()
    ring.want(CHUNK_BYTES, 3 * CHUNK_BYTES)  # the next allocation ends there, however far beyond the window
    reading.join(WITHIN_S)
    assert not reading.is_alive()


def test_closing_the_ring_cancels_a_waiting_reader() -> None:
    ring = Ring(4 * CHUNK_BYTES, 1)
    errors: list[BaseException] = []

    def read() -> None:
        try:
            ring.enter(2 * CHUNK_BYTES)
        except Cancelled as e:
            errors.append(e)

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    ring.close()
    thread.join(WITHIN_S)
    assert errors


def test_stream_works_if_the_kernel_cannot_move_pages(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Refusing:
        madvise = module._libc.madvise

        @staticmethod
        def mremap(*_: int) -> int:
            return -1

    monkeypatch.setattr(module, "_libc", Refusing)
    rings = Rings(monkeypatch)
    weights = write_checkpoint(tmp_path, tensors(megabytes=120), shards=1)
    for name, tensor in TensorStream(tmp_path):
        assert np.array_equal(tensor.numpy(), weights[name])
    assert rings.made[0].moved_chunks == 0


def test_ring_larger_than_the_free_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "available_memory", lambda: 3 * CHUNK_BYTES)
    Ring(100 * CHUNK_BYTES, 2)
    with pytest.raises(InsufficientMemory, match="put other models to sleep"):
        Ring(100 * CHUNK_BYTES, 4)
    with pytest.raises(InsufficientMemory):
        Ring(100 * CHUNK_BYTES)


def test_streamed_model_needs_only_the_window(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    rings = Rings(monkeypatch)
    weights = write_checkpoint(tmp_path, many(megabytes=240), shards=2)
    names = []
    for name, tensor in TensorStream(tmp_path):
        assert np.array_equal(tensor.numpy(), weights[name])
        names.append(name)
    assert sorted(names) == sorted(weights)
    # Beyond the window: the chunk in use, and one whose last tensor the loop's variable holds.
    assert rings.fresh <= WINDOW_CHUNKS + 2 < rings.made[0].count


def test_kept_tensors_are_unchanged(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    rings = Rings(monkeypatch)
    weights = write_checkpoint(tmp_path, many(megabytes=240), shards=2)
    kept: dict[str, torch.Tensor] = {}
    for number, (name, tensor) in enumerate(TensorStream(tmp_path)):
        if number % 20 == 0:
            kept[name] = tensor.view(-1)[1:].view(torch.uint8)  # a view of a view keeps it as well
    gc.collect()
    assert rings.made[0].moved_chunks
    for name, value in kept.items():
        assert np.array_equal(value.numpy(), weights[name].reshape(-1)[1:].view(np.uint8))


@pytest.mark.parametrize("window_chunks", [1, 2])
def test_tensors_larger_than_the_window(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, window_chunks: int) -> None:
    monkeypatch.setattr(streaming, "WINDOW_CHUNKS", window_chunks)
    generator = np.random.default_rng(5)
    weights = {f"t{i}": np.frombuffer(generator.bytes(size), np.uint8) for i, size in enumerate((3 << 20, 60 << 20, 40 << 20, 7))}
    write_checkpoint(tmp_path, weights, shards=1)
    for name, tensor in TensorStream(tmp_path):
        assert np.array_equal(tensor.numpy(), weights[name])


def test_memory_is_unmapped_with_the_last_tensor(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    rings = Rings(monkeypatch)
    write_checkpoint(tmp_path, tensors(megabytes=40), shards=1)
    kept = dict(TensorStream(tmp_path))
    mapping = weakref.ref(rings.made.pop()._map)
    gc.collect()
    assert mapping() is not None
    kept.clear()
    gc.collect()
    assert mapping() is None


def test_released_pages_are_freed_when_reading_ends() -> None:
    ring = Ring(2 * CHUNK_BYTES, 2)
    ring.enter(0)
    ring.write(0, b"\1" * CHUNK_BYTES)
    ring.release(0)
    ring.close()
    mincore = ctypes.CDLL(None).mincore
    pages = (ctypes.c_ubyte * (CHUNK_BYTES // 4096))()
    assert mincore(ctypes.c_void_p(ring._address), ctypes.c_size_t(CHUNK_BYTES), pages) == 0
    assert not any(pages)
