"""The device time of a campaign's ledger is held to the engines' meters, which end with engines."""

from __future__ import annotations

from typing import Any

import pytest

from bench.chaos.device_time import UNKNOWN_S, DeviceTime, Meters, measure


def instance(name: str, busy_s: float, pid: int | None = 1, devices: int = 1) -> dict[str, Any]:
    pids = [pid] if pid is not None else []
    ids = [f"cpu:{n}" for n in range(devices)]
    return {"instance_id": name, "pids": pids, "load": {"busy_s": busy_s}, "device_ids": ids}


def cluster(*instances: dict[str, Any]) -> dict[str, Any]:
    return {"nodes": [{"instances": [i]} for i in instances]}


def rows(*seconds: float) -> list[dict[str, Any]]:
    return [{"counts": {"compute_cpu_us": round(s * 1e6), "compute_cuda_us": 0}} for s in seconds]


def test_meters_are_added_up_over_processes_suspensions_and_ends() -> None:
    meters = Meters()
    meters.look(cluster(instance("a", 3.0), instance("b", 1.0, devices=2)), 0.0)
    meters.look(cluster(instance("a", 0.0), instance("b", 1.5, pid=None, devices=2)), 1.0)  # suspended; ended
    assert meters.total_s == 3.0 + 3.0
    meters.look(cluster(instance("a", 0.5, pid=2)), 2.0)  # another process
    assert meters.total_s == 3.5 + 3.0


def test_time_within_intervals_counts_once_and_is_never_too_little() -> None:
    meters = Meters()
    for second in range(10):
        meters.look(cluster(instance("a", second)), float(second))
    assert meters.sum_within([(2.5, 4.5)]) == 3.0
    assert meters.sum_within([(2.0, 4.0), (3.0, 5.0), (7.0, 8.0)]) == 4.0
    assert meters.sum_within([(8.0, 99.0)]) == 1.0
    assert meters.sum_within([]) == 0.0


@pytest.mark.parametrize(("ledger_s", "is_right"), [(9.89, False), (9.91, True), (10.09, True), (10.11, False)])
def test_without_kills_the_ledger_may_differ_by_one_percent(ledger_s: float, is_right: bool) -> None:
    meters = Meters()
    meters.look(cluster(instance("a", 10.0)), 0.0)
    found = measure(meters, rows(ledger_s / 2, ledger_s / 2), 0, ())
    assert found.ledger_s == pytest.approx(ledger_s)
    assert (found.find_fault() is None) == is_right


def test_kills_widen_the_bounds() -> None:
    meters = Meters()
    for second in range(101):
        meters.look(cluster(instance("a", second)), float(second))
    found = measure(meters, rows(100.0), 2, [(10.0, 20.0), (15.0, 25.0)])
    assert (found.unknown_s, found.lost_s) == (2 * UNKNOWN_S, 17.0)
    assert found.least_s == pytest.approx(99 - 4 - 17)
    assert found.most_s == pytest.approx(101 + 4)
    assert DeviceTime(77.9, 100.0, 4.0, 17.0).find_fault() == "77.90 s of devices in the ledger, not 78.00 to 105.00"
