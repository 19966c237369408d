"""The pool's chunks as the source of copies.

They are page-locked when populated, copied from any place, and unlocked before they are punched.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from random import Random

import pytest

from tests.unit.loader.devices.fake_driver import FakeDriver
from tests.unit.loader.devices.ipc_memory import opened
from weights.devices.cuda import CudaDevice
from weights.devices.port import Place
from weights.pool.chunks import CHUNK_BYTES
from weights.pool.memory import PoolMemory
from weights.pool.region import Region

SEGMENT = 2 * CHUNK_BYTES + 5 * 4096


@pytest.fixture
def driver() -> FakeDriver:
    return FakeDriver()


@pytest.fixture
def device(driver: FakeDriver) -> Iterator[CudaDevice]:
    device = CudaDevice(driver, driver.facts(0), 2 * 1024 * 1024)
    yield device
    device.close()


@pytest.fixture
def pool(device: CudaDevice) -> Iterator[PoolMemory]:
    pool = PoolMemory(
        f"thaw-test-pins-{os.getpid()}", 4 * CHUNK_BYTES, on_populated=device.pin, on_punch=lambda address, _: device.unpin(address)
    )
    yield pool
    pool.close(unlink=True)


def test_scattered_segment_is_copied_completely(driver: FakeDriver, device: CudaDevice, pool: PoolMemory) -> None:
    region = Region(pool, (3, 0, 2), SEGMENT)
    for chunk in region.chunks:
        pool.prepare(chunk)
    assert sorted(driver.pinned.values()) == [CHUNK_BYTES] * 3
    arena = device.allocate(Place("w", SEGMENT, pool.name or "", region.extents))
    content = Random(1).randbytes(SEGMENT)
    for offset in range(0, SEGMENT, CHUNK_BYTES):
        length = min(CHUNK_BYTES, SEGMENT - offset)
        with region.view(offset, length) as view:
            view[:] = content[offset : offset + length]
            start = ctypes.c_char.from_buffer(view)
            arena.fill(offset, ctypes.addressof(start), length)
            del start
    assert arena.wait(SEGMENT)
    assert opened(arena, driver, SEGMENT) == content
    assert driver.unpinned_copies == 0
    arena.release()
    assert pool.punch(region.chunks) == 3 * CHUNK_BYTES
    assert driver.pinned == {}
