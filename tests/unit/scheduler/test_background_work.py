"""Readings of the device time that engines spend on no request."""

from __future__ import annotations

from services.scheduler.domain.background_work import BackgroundReading, find_processes, list_background
from shared.contracts.engine import BackgroundWork, EngineLoad
from shared.contracts.node import InstanceStatus, NodeStatus
from shared.contracts.stages import GroupPlace
from tests.support.node_statuses import instance, status


def working(name: str, *devices: str, pids: tuple[int, ...] = (5, 6), index: int | None = None) -> InstanceStatus:
    load = EngineLoad(background=(BackgroundWork(seconds=1.5), BackgroundWork(plan_id="p", seconds=0.25)))
    group = GroupPlace(first=name, index=index, count=3) if index is not None else None
    return instance(name, 1, *devices).model_copy(update={"load": load, "pids": pids, "group": group})


def read(report: NodeStatus, known: dict[str, int] | None = None) -> list[BackgroundReading]:
    return list(list_background(report, find_processes(report, known or {})))


def test_a_reading_counts_for_each_device_of_the_instance() -> None:
    assert read(status({}, working("a-1", "cuda:0", "cuda:1"))) == [
        BackgroundReading("a-1/5", "", "a", "cuda", 3_000_000),
        BackgroundReading("a-1/5", "p", "a", "cuda", 500_000),
    ]


def test_the_first_stage_of_a_group_counts_for_all_stages() -> None:
    found = read(status({}, working("a-1", "cpu:0", index=0), working("s1-a-1", "cpu:0", index=1)))
    assert {(r.engine, r.us) for r in found} == {("a-1/5", 4_500_000), ("a-1/5", 750_000)}


def test_an_ended_engine_keeps_its_last_reading() -> None:
    ended = status({}, working("a-1", "cpu:0", pids=()))
    assert [r.engine for r in read(ended, {"a-1": 5})] == ["a-1/5", "a-1/5"]
    assert read(ended) == [], "of an engine that ended before this term nothing is known"
    assert find_processes(ended, {"a-1": 5, "gone": 7}) == {"a-1": 5}
