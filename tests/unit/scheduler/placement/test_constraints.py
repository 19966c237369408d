"""Operators' placement rules, and the reasons reported for excluded devices."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from services.scheduler.domain.placement.constraints import placement_rule
from shared.contracts.models import ModelSpec, PlacementRules
from shared.contracts.node import InstanceState
from tests.unit.scheduler.placement.zones import ZONES, placed, world
from tests.unit.scheduler.world import World


def excluded(w: World, name: str) -> dict[str, str | None]:
    plan = w.state.last_plan_of(name)
    assert plan is not None
    return {c.node: c.excluded for c in plan.candidates}


def test_labels_select_nodes() -> None:
    w = world()
    assert placed(w, "any", labels={"zone": "*"}) in ZONES
    assert placed(w, "first", labels={"zone": "a"}) == "n1"
    assert excluded(w, "first")["n2"] == "placement.labels requires zone=a: it is b"


def test_unplaceable_model_waits_and_reports_a_reason_per_node() -> None:
    w = world()
    assert placed(w, "m", labels={"gpu": "h200"}) == ""
    assert set(excluded(w, "m").values()) == {"placement.labels requires gpu=h200: the node has no such label"}
    w.agents["n3"].labels = {"gpu": "h200"}
    w.tick(1)
    w.tick(0.25)
    assert [s.node for s in w.starts("m")] == ["n3"]


def test_devices_are_chosen_by_pattern() -> None:
    w = world()
    assert placed(w, "m", devices=("n2/*",)) == "n2"
    assert excluded(w, "m")["n1"] == "placement.devices allows n2/* only"
    assert placed(w, "o", devices=("cuda:*",)) == ""


def test_anti_affinity_applies_in_both_directions() -> None:
    w = world({"n1": "a"})
    assert placed(w, "tenant-1", anti_affinity=("tenant-*",)) == "n1"
    assert placed(w, "tenant-2") == ""
    assert (excluded(w, "tenant-2")["n1"] or "").startswith("placement.anti_affinity of tenant-1, which is on the node")
    assert placed(w, "other") == "n1"


def test_anti_affinity_keeps_off_labels() -> None:
    w = world()
    assert placed(w, "m", anti_affinity=("zone=b",)) == "n1"
    assert excluded(w, "m")["n2"] == "placement.anti_affinity keeps it off zone=b"


def test_spread_model_has_one_instance_per_node() -> None:
    w = world({"n1": "a", "n2": "a"})
    w.model("m", placement={"spread": True}, replicas={"min": 3, "max": 3})
    w.tick(0.5)
    for _ in range(4):
        for r in w.of("m", InstanceState.LOADING):
            r.state = InstanceState.READY
        w.tick(0.5)
    assert sorted(s.node for s in w.starts("m")) == ["n1", "n2"]
    reasons = [c or "" for c in excluded(w, "m").values()]
    assert all(r.startswith("placement.spread") for r in reasons), reasons


def test_next_replica_prefers_another_node() -> None:
    w = world({"n1": "a", "n2": "a"})
    w.model("m", replicas={"min": 3, "max": 3})
    w.tick(0.5)
    assert sorted(s.node for s in w.starts("m"))[:3] in (["n1", "n1", "n2"], ["n1", "n2", "n2"])
    assert len({s.node for s in w.starts("m")[:2]}) == 2


def test_allowed_device_is_found_among_many_excluded_ones() -> None:
    w = world({f"n{n:02}": "far" for n in range(40)} | {"n17": "near"})
    assert placed(w, "m", labels={"zone": "near"}) == "n17"


@pytest.mark.parametrize("placement", [{"devices": ("",)}, {"labels": {"a=b": "c"}}, {"anti_affinity": (" x",)}, {"region": "eu"}])
def test_invalid_placement_rules_are_refused(placement: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        ModelSpec(name="m", source="/m", placement=placement)


names = st.sampled_from(("a1", "a2", "b1"))
patterns = st.sets(st.sampled_from(("a*", "b1", "zone=b")), max_size=2).map(tuple)
rules = st.builds(PlacementRules, anti_affinity=patterns, spread=st.booleans(), labels=st.sampled_from(({}, {"zone": "b"})))


@given(st.dictionaries(names, rules, min_size=3), st.lists(names, max_size=6))
def test_placement_never_violates_a_rule(given_rules: dict[str, PlacementRules], asked: list[str]) -> None:
    w = world()
    for name, placement in given_rules.items():
        w.model(name, placement=placement.model_dump(), replicas={"min": 0, "max": 2})
    for name in asked:
        w.demand(name)
        w.tick(0.5)
    for i in w.state.instances.values():
        others = w.state.fork()
        others.by_node[i.node] = tuple(x for x in others.by_node[i.node] if x != i.instance_id)
        check = placement_rule(others, w.state.models[i.model])
        assert check is None or not check(w.state.bookings[f"{i.node}/cpu:0"])
