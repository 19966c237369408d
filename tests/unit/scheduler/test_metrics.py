"""The exported metrics of plans."""

from __future__ import annotations

import urllib.request
from functools import partial

import pytest

from services.scheduler.domain.state.volatile import Presence
from services.scheduler.domain.suspensions import SuspensionStep
from services.scheduler.metrics import Metrics
from shared.contracts.loader import DeviceMemory, LinkStatus, LoaderStatus
from shared.contracts.node import NodeStatus, SwapSpace
from shared.contracts.phases import Phase, PhaseSpan
from shared.contracts.plans import PlanRecord


@pytest.fixture
def metrics() -> Metrics:
    return Metrics()


def plan(outcome: str = "ready", **chosen: object) -> PlanRecord:
    given = {"node": "n", "device_ids": ("cpu:0",), "way": "load", "predicted_ms": 1000.0, "source": "ssd", **chosen}
    spans = (PhaseSpan(phase=Phase.LOAD, start_ms=0, duration_ms=700), PhaseSpan(phase=Phase.LOAD, start_ms=500, duration_ms=400))
    record = {"plan_id": "p", "model": "a", "created": 0, "trigger": "demand", "way": "load", "chosen": given, "measured": spans}
    return PlanRecord.model_validate({**record, "outcome": outcome})


def figures(text: bytes) -> dict[str, float]:
    rows = (line.rsplit(" ", 1) for line in text.decode().splitlines() if not line.startswith("#"))
    return {name.partition("{")[0]: float(value) for name, value in rows if "_bucket" not in name}


def test_prediction_outcome_and_error_of_a_plan(metrics: Metrics) -> None:
    metrics.plan(plan(took_ms=1500.0))
    found = figures(metrics.render())
    assert found["thaw_plan_predicted_seconds_sum"] == 1.0
    assert found["thaw_plan_took_seconds_sum"] == 1.5
    assert found["thaw_plan_error_seconds_sum"] == 0.5
    assert found["thaw_plan_phase_seconds_sum"] == pytest.approx(0.9)
    assert 'thaw_source="ssd"' in metrics.render().decode()


def test_failed_plan_is_counted_without_a_duration(metrics: Metrics) -> None:
    metrics.plan(plan("failed"))
    text = metrics.render().decode()
    assert 'thaw_outcome="failed"' in text
    assert "thaw_plan_took" not in text


def test_victims_clearing_and_restarts_are_counted(metrics: Metrics) -> None:
    metrics.plan(plan("failed", victims=("b (b-1)", "c (c-1)"), cleared_ms=1500.0))
    metrics.plan(plan().model_copy(update={"caused_by": "p", "measured_ms": 4000.0}))
    found = figures(metrics.render())
    names = ("thaw_plan_victims_total", "thaw_plan_clearing_seconds_total", "thaw_plan_restarts_seconds_total")
    assert [found[name] for name in names] == [2, 1.5, 4]


def test_metrics_are_served_over_http(metrics: Metrics) -> None:
    metrics.plan(plan(took_ms=1500.0))
    with metrics.served("127.0.0.1", 0) as port, urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
        assert b"thaw_plan_error_seconds_sum" in answer.read()


def test_pages_of_devices_and_violations(metrics: Metrics) -> None:
    memory = DeviceMemory(
        device_id="cpu:1",
        total_bytes=10,
        free_bytes=4,
        mapped_bytes=3,
        reusable_bytes=2,
        lent_bytes=1,
        copied_bytes=30,
        reused_bytes=70,
        violations=("page 3 is nowhere",),
    )
    metrics.loaders = lambda: (LoaderStatus(node="node-0", boot_id="b", memory=(memory,)),)
    text = metrics.render().decode()
    assert 'thaw_device_memory_bytes{thaw_device="cpu:1",thaw_node="node-0",thaw_state="reusable"} 2.0' in text
    assert 'thaw_device_violations{thaw_device="cpu:1",thaw_node="node-0"} 1.0' in text
    for what, nbytes in (("copied", 30.0), ("reused", 70.0)):
        assert f'thaw_device_{what}_bytes_total{{thaw_device="cpu:1",thaw_node="node-0"}} {nbytes}' in text


def test_each_device_of_a_large_cluster_has_its_rows_until_its_node_is_gone(metrics: Metrics) -> None:
    """OpenTelemetry's instruments keep 2,000 sets of labels, and keep them for ever."""

    def rows(name: str) -> int:
        return sum(line.startswith(f"{name}{{") for line in metrics.render().decode().splitlines())

    for names in (range(600), range(600, 1200), range(1200, 1201)):
        memory = DeviceMemory(device_id="cuda:0", total_bytes=1, free_bytes=1, mapped_bytes=0, reusable_bytes=0, lent_bytes=0)
        statuses = [LoaderStatus(node=f"n{n}", boot_id="b", memory=(memory,)) for n in names]
        metrics.loaders = partial(iter, statuses)
        assert rows("thaw_device_memory_bytes") == 4 * len(names)
        assert rows("thaw_device_copied_bytes_total") == len(names)


def test_names_types_and_labels_are_those_of_opentelemetry(metrics: Metrics) -> None:
    """Some rows have a label that others lack; a metric without values is not exported."""
    links = (LinkStatus(link="a", moved_bytes=1, is_paced=True), LinkStatus(link="b", moved_bytes=2))
    metrics.loaders = lambda: (LoaderStatus(node="n", boot_id="b", links=links),)
    lines = metrics.render().decode().splitlines()
    assert [line for line in lines if "thaw_link_moved" in line] == [
        "# HELP thaw_link_moved_bytes_total Bytes that have crossed a link of a node.",
        "# TYPE thaw_link_moved_bytes_total counter",
        'thaw_link_moved_bytes_total{thaw_link="a",thaw_node="n",thaw_paced="true"} 1.0',
        'thaw_link_moved_bytes_total{thaw_link="b",thaw_node="n",thaw_paced=""} 2.0',
    ]
    assert "# TYPE thaw_link_loads gauge" in lines
    assert not [line for line in lines if "thaw_link_bandwidth" in line]


def test_caches_disk_and_swap_of_nodes(metrics: Metrics) -> None:
    metrics.loaders = lambda: (
        LoaderStatus(node="a", boot_id="b", dram_bytes=7, ssd_bytes=8, disk_bytes=100, disk_free_bytes=40),
        LoaderStatus(node="earlier", boot_id="b"),
    )
    swap = SwapSpace(total_bytes=10, free_bytes=1)
    statuses = (NodeStatus(node=n, boot_id="b", seq=1, devices=(), swap=s) for n, s in (("a", swap), ("earlier", None)))
    nodes = tuple(Presence(s.node, 0.0, status=s) for s in statuses)
    metrics.nodes = lambda: nodes
    lines = metrics.render().decode().splitlines()
    assert {'thaw_cache_bytes{thaw_node="a",thaw_tier="dram"} 7.0', 'thaw_cache_bytes{thaw_node="a",thaw_tier="ssd"} 8.0'} <= set(
        lines
    )
    assert [line for line in lines if line.startswith(("thaw_disk_bytes{", "thaw_swap_bytes{"))] == [
        'thaw_disk_bytes{thaw_node="a",thaw_state="used"} 60.0',
        'thaw_disk_bytes{thaw_node="a",thaw_state="free"} 40.0',
        'thaw_swap_bytes{thaw_node="a",thaw_state="used"} 9.0',
        'thaw_swap_bytes{thaw_node="a",thaw_state="free"} 1.0',
    ]


def test_links_with_what_waits_and_what_has_crossed(metrics: Metrics) -> None:
    disk = LinkStatus(link="ssd:a", bytes_per_second=3e9, queued_bytes=20, loads=2, moved_bytes=700)
    unused = LinkStatus(link="remote:b")
    metrics.loaders = lambda: (LoaderStatus(node="node-0", boot_id="b", links=(disk, unused)),)
    text = metrics.render().decode()
    expected: dict[str, object] = {
        "moved_bytes_total": 700.0,
        "queued_bytes": 20.0,
        "loads": 2.0,
        "bandwidth_bytes_per_second": "3e+09",
    }
    for name, value in expected.items():
        assert f'thaw_link_{name}{{thaw_link="ssd:a",thaw_node="node-0"}} {value}' in text, text
    assert 'thaw_link_moved_bytes_total{thaw_link="remote:b",thaw_node="node-0"} 0.0' in text
    assert 'thaw_link_bandwidth_bytes_per_second{thaw_link="remote:b"' not in text, "not measured yet"


def test_bandwidth_that_is_a_setting_is_labelled(metrics: Metrics) -> None:
    paced = LinkStatus(link="device:a", bytes_per_second=5.0, is_paced=True)
    metrics.loaders = lambda: (LoaderStatus(node="n", boot_id="b", links=(paced,)),)
    expected = 'thaw_link_bandwidth_bytes_per_second{thaw_link="device:a",thaw_node="n",thaw_paced="true"} 5.0'
    assert expected in metrics.render().decode()


def test_plans_and_suspensions_of_each_of_many_models_have_rows(metrics: Metrics) -> None:
    """OpenTelemetry's instruments keep 2,000 sets of labels."""
    names = [f"m{number}" for number in range(2_100)]
    for name in names:
        metrics.plan(plan(took_ms=1500.0).model_copy(update={"model": name}))
        metrics.suspension(SuspensionStep("suspend", "n", name, "cpu", 70.0))
    lines = metrics.render().decode().splitlines()
    for metric in ("thaw_plan_took_seconds_count", "thaw_plan_outcomes_total", "thaw_suspend_seconds_count"):
        rows = [line for line in lines if line.startswith(f"{metric}{{")]
        assert len(rows) == len(names)
        assert 'gen_ai_request_model="m2099"' in rows[-1]
