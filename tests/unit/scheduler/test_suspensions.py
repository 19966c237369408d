"""Suspensions and resumptions that the scheduler finds in the statuses of nodes."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from services.scheduler.domain.state.volatile import Presence
from services.scheduler.domain.suspensions import SuspensionStep, SuspensionWatch
from services.scheduler.metrics import Metrics
from shared.contracts.node import InstanceState, InstanceStatus, NodeStatus, Suspension, Timing

BY_PAGE_OUT = Suspension(way="cpu")


def instance(name: str = "i", **fields: object) -> InstanceStatus:
    given = {"plan_id": "p", "token": 1, "model": "m", "generation": 1, "revision": "r", "device_ids": ("cpu:0",)}
    return InstanceStatus.model_validate({**given, "instance_id": name, "state": "ready", "suspension": BY_PAGE_OUT, **fields})


def suspended(took_ms: float, at: float = 100.0, suspension: Suspension = BY_PAGE_OUT) -> InstanceStatus:
    return instance(state="suspended", suspended=Timing(at=at, took_ms=took_ms), suspension=suspension)


def status(seq: int, instances: Sequence[InstanceStatus] = (), boot_id: str = "b") -> NodeStatus:
    return NodeStatus(node="n", boot_id=boot_id, seq=seq, devices=(), instances=tuple(instances))


def test_each_suspension_and_resumption_counts_once() -> None:
    watch = SuspensionWatch()
    assert watch.on_status(status(1, [instance()])) == []
    step = SuspensionStep("suspend", "n", "m", "cpu", 70.0)
    assert watch.on_status(status(2, [suspended(70.0)])) == [step]
    # The end of a step is computed again for each status.
    assert watch.on_status(status(3, [suspended(70.0, at=100.0001)])) == []
    both = suspended(70.0).model_copy(update={"state": InstanceState.READY, "resumed": Timing(at=1, took_ms=9.0)})
    assert watch.on_status(status(4, [both])) == [SuspensionStep("resume", "n", "m", "cpu", 9.0)]
    again = both.model_copy(update={"state": InstanceState.SUSPENDED, "suspended": Timing(at=2, took_ms=71.0)})
    assert watch.on_status(status(5, [again])) == [SuspensionStep("suspend", "n", "m", "cpu", 71.0)]


def test_instance_that_is_parked_at_its_start_counts() -> None:
    watch = SuspensionWatch()
    watch.on_status(status(1))
    assert [s.took_ms for s in watch.on_status(status(2, [suspended(70.0)]))] == [70.0]


def test_first_status_of_a_node_counts_nothing() -> None:
    watch = SuspensionWatch()
    assert watch.on_status(status(7, [suspended(70.0)])) == []
    assert watch.on_status(status(8, [suspended(70.0)])) == []


def test_messages_out_of_order_count_nothing() -> None:
    watch = SuspensionWatch()
    watch.on_status(status(1, [instance()]))
    assert len(watch.on_status(status(3, [suspended(70.0)]))) == 1
    assert watch.on_status(status(2, [instance()])) == []
    assert watch.on_status(status(4, [suspended(70.0)])) == []


def test_restarted_nodeagent_that_adopted_its_engines_counts_nothing() -> None:
    watch = SuspensionWatch()
    watch.on_status(status(9, [suspended(70.0)]))
    assert watch.on_status(status(1, [suspended(70.0)], boot_id="next")) == []


def test_metrics_of_suspensions() -> None:
    metrics = Metrics()
    for kind, took_ms in (("suspend", 70.0), ("resume", 2_000.0), ("resume", 1_000.0)):
        metrics.suspension(SuspensionStep(kind, "n", "m", "cpu", took_ms))  # type: ignore[arg-type]
    lines = metrics.render().decode().splitlines()
    names = '{gen_ai_request_model="m",thaw_node="n",thaw_way="cpu"}'
    assert f"thaw_suspend_seconds_sum{names} 0.07" in lines
    assert f"thaw_resume_seconds_sum{names} 3.0" in lines
    assert f"thaw_resume_seconds_count{names} 2.0" in lines


@pytest.mark.parametrize(("way", "host", "swap"), [("cpu", 0, 40), ("cuda", 100, 40)])
def test_bytes_of_suspended_engines_by_place(way: str, host: int, swap: int) -> None:
    """A paged-out snapshot is all in swap; one in host memory may have a part there besides."""
    suspension = Suspension.model_validate({"way": way, "snapshot_bytes": 40 if way == "cpu" else 100, "swap_bytes": 40})
    parked = [suspended(1.0, suspension=suspension).model_copy(update={"instance_id": name}) for name in ("i", "j")]
    metrics = Metrics()
    metrics.nodes = lambda: (Presence("n", 0.0, status=status(1, [*parked, instance("k", suspension=suspension)])),)
    found = [line for line in metrics.render().decode().splitlines() if line.startswith("thaw_suspended_bytes{")]
    names = 'gen_ai_request_model="m",thaw_node="n"'
    assert found == [
        f'thaw_suspended_bytes{{{names},thaw_place="host"}} {2.0 * host}',
        f'thaw_suspended_bytes{{{names},thaw_place="swap"}} {2.0 * swap}',
    ]
