"""Devices with memory of their own, on cpu and on the stand-in GPU, and models to load to them."""

from __future__ import annotations

import ctypes
import hashlib
import os
import random
from collections.abc import Sequence

from shared.contracts.segment import GpuUnitsHandle, PagesHandle, SegmentTensor
from shared.mapping import map_extents
from tests.unit.loader.store.gpu import Gpu
from weights.devices.port import Arena, Contents, Place
from weights.pool import shm
from weights.store.arena import PagedArena
from weights.store.generations import file_name, retire
from weights.store.separate import SeparateDevice
from weights.store.units import PAGE_BYTES
from weights.store.usage import PagesInUse

PREFIX = f"thaw-test{os.getpid()}-"
HEAD = 4096
TENSOR = PAGE_BYTES
"""Bytes of a tensor: one page, one unit."""
COUNT = 12
GPUS: dict[object, Gpu] = {}
"""The GPU of each open device that is one."""


def made_on_gpu(*, pages: int = COUNT, verify: bool = False) -> SeparateDevice:
    gpu = Gpu(pages, verify=verify)
    GPUS[gpu.device] = gpu
    return gpu.device


def close(device: SeparateDevice) -> None:
    (GPUS.pop(device).close if device in GPUS else device.close)()


def made(boot: str = "boot", *, pages: int = COUNT, verify: bool = False) -> SeparateDevice:
    name = file_name(PREFIX, "cpu:1", boot)
    return SeparateDevice("cpu:1", pages * PAGE_BYTES, name, earlier=retire(PREFIX, "cpu:1"), verify=verify)


class Model:
    """A segment in host memory: a head, then one tensor for each seed. Equal seeds: equal bytes."""

    def __init__(self, name: str, *seeds: int) -> None:
        self.name, self.seeds = name, seeds
        self.content = [random.Random(seed).randbytes(4096) * (TENSOR // 4096) for seed in seeds]
        self.raw = ctypes.create_string_buffer(bytes(HEAD) + b"".join(self.content))
        self.address, self.nbytes = ctypes.addressof(self.raw), HEAD + TENSOR * len(seeds)
        self.tensors = tuple(
            SegmentTensor(name=f"t{i}", dtype="U8", shape=(TENSOR,), offset=HEAD + i * TENSOR, nbytes=TENSOR)
            for i in range(len(seeds))
        )
        self.digests = {f"t{i}": hashlib.sha256(c).hexdigest() for i, c in enumerate(self.content)}

    def place(self, *, hashed: bool = True, pinned: bool = False) -> Place:
        contents = Contents(self.tensors, self.digests if hashed else {}, self.name, pinned)
        return Place(self.name, self.nbytes, "", contents=contents)


def load(device: SeparateDevice, model: Model, *, hashed: bool = True, pinned: bool = False) -> PagedArena:
    arena = device.allocate(model.place(hashed=hashed, pinned=pinned))
    fill(arena, model)
    return arena


def fill(arena: PagedArena, model: Model, step: int = 3_000_017) -> None:
    """Fill it in pieces that cross units, the last one first."""
    for start in reversed(range(0, model.nbytes, step)):
        arena.fill(start, model.address + start, min(step, model.nbytes - start))
    assert arena.wait(model.nbytes)


def seen(arena: Arena, tensors: Sequence[SegmentTensor]) -> list[bytes]:
    """Return what an engine reads of each tensor."""
    handle = arena.handle()
    assert isinstance(handle, PagesHandle | GpuUnitsHandle)
    places = []
    for t in tensors:
        unit = next(u for u in handle.units if u.offset <= t.offset < u.offset + u.nbytes)
        places.append((unit.start + t.offset - unit.offset, t.nbytes))
    assert isinstance(arena, PagedArena)
    if isinstance(handle, GpuUnitsHandle):
        return GPUS[arena._device].read(arena, handle, places)
    mapped = map_extents(shm.SHM / handle.file, handle.extents)
    try:
        return [mapped[start : start + nbytes] for start, nbytes in places]
    finally:
        mapped.close()


def check(arena: PagedArena, model: Model) -> None:
    assert seen(arena, model.tensors) == model.content


def pages_of(used: PagesInUse) -> tuple[int, int, int, int]:
    """Return free, mapped, reusable and lent pages; their sum is the pool."""
    found = (used.free_bytes, used.mapped_bytes, used.reusable_bytes, used.lent_bytes)
    assert sum(found) == used.total_bytes
    return (found[0] // PAGE_BYTES, found[1] // PAGE_BYTES, found[2] // PAGE_BYTES, found[3] // PAGE_BYTES)
