"""The elbow of a size/throughput curve: measurement and storage."""

from __future__ import annotations

from pathlib import Path

import pytest

from shared.errors import DeviceFailed
from tests.unit.loader.devices.fake_driver import FakeDriver
from weights.devices.curve import FALLBACK_BYTES, Point, cap_curve, find_elbow
from weights.devices.probe import group_bytes, measure, measure_rounds

KIB, MIB = 1024, 1024 * 1024


def bus(latency: float, rate: float) -> list[Point]:
    """Simulate a bus with `latency` for every copy and `rate` bytes per second."""
    return [Point(64 * KIB * 2**i, 1 / (latency / (64 * KIB * 2**i) + 1 / rate)) for i in range(11)]


@pytest.mark.parametrize(
    ("points", "expected"),
    [
        ([], FALLBACK_BYTES),
        ([Point(0, 5.0), Point(64 * KIB, 0.0)], FALLBACK_BYTES),
        ([Point(MIB, 7e9)], MIB),
        (bus(4e-6, 25e9), 2 * MIB),  # 100 kB of latency: 19 times that is 95 % of the rate
        (bus(0.0, 25e9), 64 * KIB),
        (bus(1.0, 25e9), 64 * MIB),
        ([Point(KIB, 10.0), Point(2 * KIB, 3.0), Point(4 * KIB, 9.9), Point(8 * KIB, 10.1)], 4 * KIB),  # an outlier does not count
        ([Point(KIB, 1.0), Point(2 * KIB, 10.0), Point(4 * KIB, 7.0)], 2 * KIB),  # slower again beyond the peak
    ],
)
def test_elbow_of_a_curve_is_found(points: list[Point], expected: int) -> None:
    assert find_elbow(points) == expected
    assert find_elbow(points[::-1]) == expected


def test_a_paced_link_needs_no_larger_groups_than_its_pace() -> None:
    curve = bus(4e-6, 25e9)
    assert cap_curve(curve, None) == curve
    assert find_elbow(cap_curve(curve, 12e9)) == 128 * KIB


class SlowBus:
    """A clock that copies advance: 10 ms each, and the first of each size 100 ms."""

    def __init__(self) -> None:
        self.now, self.copies = 0.0, []  # type: float, list[int]

    def copy(self, size: int, count: int) -> None:
        self.now += count * (0.01 if size in self.copies else 0.1)
        self.copies.append(size)


@pytest.mark.parametrize(("seconds", "rounds"), [(0.0, 1), (0.5, 1), (0.52, 2), (100.0, 3)])
def test_rounds_end_with_the_time_and_the_best_counts(seconds: float, rounds: int) -> None:
    bus = SlowBus()
    points = measure_rounds(bus.copy, (1000, 3000), bytes_per_point=4000, rounds=3, seconds=seconds, clock=lambda: bus.now)
    assert bus.copies == [1000, 3000] * rounds
    each = 0.1 if rounds == 1 else 0.01
    assert [p.nbytes for p in points] == [1000, 3000]
    assert [p.bytes_per_second for p in points] == pytest.approx([1000 / each, 3000 / each])


def test_probe_releases_all_its_resources() -> None:
    driver = FakeDriver()
    points = measure(driver, driver.facts(0), (4096, 8192), 16384)
    assert [p.nbytes for p in points] == [4096, 8192]
    assert all(p.bytes_per_second > 0 for p in points)
    assert driver.unpinned_copies == 0
    assert (driver.memory, driver.pinned, driver.streams, driver.events) == ({}, {}, [], 0)


def test_curve_is_measured_once_per_device_and_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[int] = []

    def stand_in(_: object, facts: object) -> list[Point]:
        measured.append(1)
        return bus(4e-6, 25e9)

    monkeypatch.setattr("weights.devices.probe.measure", stand_in)
    driver, cache = FakeDriver(2), tmp_path / "state" / "curves.json"
    assert [group_bytes(driver, driver.facts(n), cache) for n in (0, 1, 0, 1)] == [2 * MIB] * 4
    assert len(measured) == 2
    cache.write_text('{"broken": 3}')
    assert group_bytes(driver, driver.facts(0), cache) == 2 * MIB
    assert len(measured) == 3
    assert group_bytes(driver, driver.facts(0), cache / "under a file") == 2 * MIB, "it is used all the same"


def test_failed_probe_uses_the_fallback_and_is_not_cached(tmp_path: Path) -> None:
    driver = FakeDriver()
    driver.fail_copy = True
    with pytest.raises(DeviceFailed):
        measure(driver, driver.facts(0), (4096,), 4096)
    driver.fail_copy = True
    assert group_bytes(driver, driver.facts(0), tmp_path / "curves.json") == FALLBACK_BYTES
    assert not (tmp_path / "curves.json").exists()
    assert (driver.memory, driver.pinned, driver.streams) == ({}, {}, [])
