"""The copy group of a separate device is measured on memory like its own."""

from __future__ import annotations

import errno

import pytest

from weights.devices.curve import FALLBACK_BYTES
from weights.store import probe
from weights.store.memory import PageMemory
from weights.store.probe import SIZES, group_bytes, measure
from weights.store.units import PAGE_BYTES


def test_every_size_has_a_point_and_the_bytes_are_in_the_pages() -> None:
    memory = PageMemory(None, 2)
    try:
        points = measure(memory, (PAGE_BYTES // 2, PAGE_BYTES, 2 * PAGE_BYTES))
        assert [p.nbytes for p in points] == [PAGE_BYTES // 2, PAGE_BYTES, 2 * PAGE_BYTES]
        assert all(p.bytes_per_second > 0 for p in points)
        assert memory.allocated_bytes() == 2 * PAGE_BYTES, "the copies went into the pages"
    finally:
        memory.close()


def test_the_group_of_a_device_is_one_of_the_measured_sizes() -> None:
    assert group_bytes("cpu:1") in SIZES
    assert group_bytes("cpu:1", 1.0) == SIZES[0], "on a link that slow all sizes are equal"


def test_without_memory_for_the_probe_the_published_elbow_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: PageMemory) -> list[object]:
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(probe, "measure", full)
    assert group_bytes("cpu:1") == FALLBACK_BYTES
