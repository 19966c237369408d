"""Units of a separate device are reported in groups, in execution order."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import pytest

from shared.contracts.segment import SegmentTensor
from weights.devices.port import Contents, Place
from weights.store.arena import PagedArena
from weights.store.separate import SeparateDevice
from weights.store.units import PAGE_BYTES

NAMES = ["lm_head.weight", "model.embed_tokens.weight", *(f"model.layers.{i}.mlp.up_proj.weight" for i in (0, 1, 10, 2))]
"""As a safetensors file has them: by name."""
IN_ORDER = [1, 2, 3, 5, 4, 0]


@pytest.fixture
def source() -> ctypes.Array[ctypes.c_char]:
    return ctypes.create_string_buffer(len(NAMES) * PAGE_BYTES)


@pytest.fixture(params=[1, 3], ids=["units", "groups"])
def device(request: pytest.FixtureRequest) -> Iterator[SeparateDevice]:
    device = SeparateDevice("cpu:1", len(NAMES) * PAGE_BYTES, None, group_bytes=request.param * PAGE_BYTES)
    yield device
    assert device.audit() == []
    device.close()


def opened(device: SeparateDevice, source: ctypes.Array[ctypes.c_char]) -> PagedArena:
    """Fill an arena at once: all units are ready while the first is being copied."""
    for i in range(len(NAMES)):
        source[i * PAGE_BYTES] = bytes([i + 1])
    tensors = tuple(
        SegmentTensor(name=name, dtype="U8", shape=(PAGE_BYTES,), offset=i * PAGE_BYTES, nbytes=PAGE_BYTES)
        for i, name in enumerate(NAMES)
    )
    arena = device.allocate(Place("w", len(NAMES) * PAGE_BYTES, "", contents=Contents(tensors)))
    with device.changed:  # the copying thread sees all of them
        arena.fill(0, ctypes.addressof(source), len(NAMES) * PAGE_BYTES)
    return arena


def test_units_are_copied_and_reported_in_execution_order(device: SeparateDevice, source: ctypes.Array[ctypes.c_char]) -> None:
    arena = opened(device, source)
    found: list[int] = []
    while units := arena.wait_units(len(found)):
        found += [u.unit for u in units]
    assert found == IN_ORDER
    assert arena.wait(arena.nbytes)


def test_a_wait_for_units_ends_with_the_arena(device: SeparateDevice) -> None:
    tensors = (SegmentTensor(name="t", dtype="U8", shape=(PAGE_BYTES,), offset=0, nbytes=PAGE_BYTES),)
    arena = device.allocate(Place("w", PAGE_BYTES, "", contents=Contents(tensors)))
    arena.release()
    assert arena.wait_units(0) == ()
