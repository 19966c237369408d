"""Findings that follow from the state of a mesh."""

from __future__ import annotations

from typing import Any

import pytest

from shared.contracts.admin import ClusterView, LoaderView, ModelView, NodeView, ObjectiveView, ParkView
from shared.contracts.findings import Diagnosis, Finding
from shared.contracts.loader import DeviceMemory
from shared.contracts.node import Capability, DeviceStatus
from shared.diagnosis import examine_admin_access, examine_cluster, examine_gateway, report_no_scheduler
from tests.support.fake_engine import card_of

DEVICE = DeviceStatus(device_id="cpu:0", kind="cpu", budget_bytes=1, reserved_bytes=0)


def node(**fields: Any) -> NodeView:
    return NodeView.model_validate({"node": "node-0", "alive": True, "loader_alive": True, "devices": (DEVICE,)} | fields)


def examined(*nodes: NodeView, models: tuple[ModelView, ...] = ()) -> list[Finding]:
    """Return the findings about a cluster, without those of the scheduler and of healthy models."""
    found = list(examine_cluster(ClusterView(scheduler="s", epoch=1, nodes=nodes, models=models)))
    assert (found[0].subject, found[0].level) == ("scheduler", "ok")
    return [f for f in found[1:] if (f.subject, f.level) != ("models", "ok")]


def memory(*violations: str, changed_units: int = 0) -> LoaderView:
    fields = {"total_bytes": 1, "free_bytes": 1, "mapped_bytes": 0, "reusable_bytes": 0}
    return LoaderView(memory=(DeviceMemory(device_id="cpu:1", violations=violations, changed_units=changed_units, **fields),))


@pytest.mark.parametrize(
    ("fields", "level", "text", "remedy"),
    [
        ({}, "ok", "node-0: cpu:0", ""),
        ({"alive": False}, "fail", "node-0 does not answer", "nodeagent's log"),
        ({"loader_alive": False}, "fail", "node-0 has no loader that answers", "loader's log"),
        ({"devices": ()}, "warn", "node-0: no devices", "THAW_DEVICES"),
        ({"cordoned": True}, "warn", "node-0 is cordoned", "thaw node uncordon node-0"),
    ],
)
def test_state_of_a_node_is_one_finding_with_a_remedy(fields: dict[str, Any], level: str, text: str, remedy: str) -> None:
    [found] = examined(node(**fields))
    assert (found.level, found.text) == (level, text)
    assert remedy in found.remedy
    assert bool(found.meaning) == (level != "ok")


def test_device_memory_is_that_of_the_latest_audit() -> None:
    [_, sound] = examined(node(loader=memory()))
    [_, broken] = examined(node(loader=memory("page 3 is nowhere")))
    assert (sound.level, broken.level) == ("ok", "fail")
    assert "page 3 is nowhere" in broken.text


def test_changed_units_are_a_warning_about_their_device() -> None:
    [_, changed, accounts] = examined(node(loader=memory(changed_units=2)))
    assert (changed.level, accounts.level) == ("warn", "ok")
    assert "node-0 cpu:1: loads found 2 units with changed bytes" in changed.text


def test_missing_capability_counts_for_kinds_of_devices_that_the_node_has() -> None:
    lacking = tuple(Capability(name=f"suspend:{kind}", available=False, reason="no swap") for kind in ("cpu", "cuda", "sleep"))
    [_, found] = examined(node(capabilities=lacking))
    assert (found.level, found.text) == ("warn", "node-0 suspends no engine on cpu: no swap")
    assert len(examined(node(capabilities=(Capability(name="suspend:cpu", available=True),)))) == 1


def test_cluster_without_nodes_starts_nothing() -> None:
    assert [(f.subject, f.level) for f in examined()] == [("nodes", "fail")]


def test_model_that_failed_is_shown_without_the_log_of_its_engine() -> None:
    card = card_of("one")
    failed = ModelView(card=card, error="The engine (pid 7) ended; the end of its log:\nsecret")
    late = ModelView(card=card, objective=ObjectiveView(total=10, met=5, percentile=0.95, required=90.2))
    unparked = ModelView(card=card, park=ParkView(state="impossible", reason="no swap"))
    fine = ModelView(card=card, objective=ObjectiveView(total=10, met=10, percentile=0.95, required=-1))
    found = examined(node(), models=(failed, late, unparked, fine))[1:]
    assert [(f.level, f.text) for f in found] == [
        ("fail", "one did not start: The engine (pid 7) ended; the end of its log:"),
        ("warn", "one misses its objective: 5 of 10 requests of the last day met it, 95 % shall"),
        ("warn", "one is not parked: no swap"),
    ]
    healthy = list(examine_cluster(ClusterView(scheduler="s", epoch=1, nodes=(node(),), models=(fine, late))))
    assert (healthy[-1].subject, healthy[-1].level) == ("models", "ok")


def test_diagnosis_is_ok_without_a_failure() -> None:
    warned = [examine_gateway("g", ()), examine_admin_access(guarded=False)]
    assert Diagnosis.from_findings(warned).ok
    assert not Diagnosis.from_findings([*warned, report_no_scheduler("none leads")]).ok
    assert not Diagnosis.from_findings([examine_gateway("g", ["not connected to NATS"])]).ok
