"""The device time of a campaign's ledger is held to the engines' meters."""

from __future__ import annotations

from typing import Any

import pytest

from bench.chaos.device_time import UNKNOWN_S, DeviceTime, Meters, measure


def instance(name: str, busy_s: float, pid: int = 1, devices: int = 1, ended_pid: int = 0, model: str = "m") -> dict[str, Any]:
    ids = [f"cpu:{n}" for n in range(devices)]
    fields = {"pids": [] if ended_pid else [pid], "ended_pid": ended_pid, "load": {"busy_s": busy_s}}
    return {"instance_id": name, "model": model, "device_ids": ids} | fields


def cluster(*instances: dict[str, Any]) -> dict[str, Any]:
    return {"nodes": [{"instances": [i]} for i in instances]}


def row(seconds: float, background_s: float = 0.0, model: str = "m") -> dict[str, Any]:
    counts = {"compute_cpu_us": round(seconds * 1e6), "compute_cuda_us": 0, "background_s": background_s}
    return {"model": model, "counts": counts}


def test_meters_are_added_up_over_processes_suspensions_and_ends() -> None:
    meters = Meters()
    meters.read(cluster(instance("a", 3.0), instance("b", 1.0, devices=2)))
    meters.read(cluster(instance("a", 0.0), instance("b", 1.5, ended_pid=1, devices=2)))  # suspended; ended
    assert meters.total_s == 3.0 + 3.0
    meters.read(cluster(instance("a", 0.5, pid=2)))  # another process
    assert meters.total_s == 3.5 + 3.0
    meters.read(cluster(instance("c", 2.0, ended_pid=4)))  # seen after its end only
    assert meters.total_s == 3.5 + 3.0 + 2.0


@pytest.mark.parametrize(("ledger_s", "is_right"), [(9.89, False), (9.91, True), (10.09, True), (10.11, False)])
def test_without_kills_the_ledger_may_differ_by_one_percent(ledger_s: float, is_right: bool) -> None:
    meters = Meters()
    meters.read(cluster(instance("a", 10.0)))
    found = measure(meters, [row(ledger_s / 2), row(ledger_s / 2, 1.0)], 0)
    assert found.ledger_s == pytest.approx(ledger_s)
    assert found.background_s == 1.0
    assert (found.find_fault() is None) == is_right
    assert not found.is_settled
    assert measure(meters, [row(9.996)], 0).is_settled


def test_killed_engines_widen_the_bounds_by_a_step() -> None:
    meters = Meters()
    meters.read(cluster(instance("a", 100.0)))
    found = measure(meters, [row(100.0)], 2)
    assert found.least_s == pytest.approx(99 - 2 * UNKNOWN_S)
    assert found.most_s == pytest.approx(101 + 2 * UNKNOWN_S)
    assert DeviceTime(98.7, 100.0, unknown_s=0.2).find_fault() == "98.70 s of devices in the ledger, not 98.80 to 101.20"


def test_each_model_is_compared_with_its_engines() -> None:
    meters = Meters()
    meters.read(
        cluster(instance("a-1", 3.0), instance("a-2", 1.0), instance("b-1", 2.0, model="n"), instance("c-1", 0.0, model="o"))
    )
    found = measure(meters, [row(2.0), row(1.5, 0.5), row(2.0, model="n")], 0)
    assert found.models == (
        "m: 3.50 s, 0.50 s of it for no request, -0.500 s; a-1/1 3.00, a-2/1 1.00",
        "n: 2.00 s, 0.00 s of it for no request, +0.000 s; b-1/1 2.00",
    )
