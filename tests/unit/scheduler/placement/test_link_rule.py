"""A fetch that would make others miss their objectives waits, or is made smaller."""

from __future__ import annotations

from typing import Any

from services.scheduler.domain.events import AddModelsRequested, LoaderStatusReceived
from services.scheduler.domain.state.volatile import Fetch
from shared.contracts.base import ErrorBody
from shared.contracts.loader import LinkStatus, LoaderStatus, SegmentStatus
from shared.contracts.model_info import LayerSizes
from shared.contracts.models import ModelSpec, Slo
from shared.contracts.plans import PlanRecord
from tests.support.fake_node import MIB, model_info
from tests.unit.scheduler.world import World

WEIGHTS = 158 * MIB
SPEED = 20 * MIB
"""Bandwidth of a node's link: the whole model takes 7.9 s alone."""


def add(w: World, name: str, **options: Any) -> None:
    spec = ModelSpec(name=name, source=f"http://far/{name}", max_concurrency=1, **options)
    layers = LayerSizes(count=12, embedding_bytes=MIB, layer_bytes=13 * MIB, head_bytes=MIB)
    info = model_info(spec.source, WEIGHTS).model_copy(update={"layers": layers, "model_type": "llama"})
    answer = w.admin(AddModelsRequested(w.now, f"add {name}", (spec,), {name: info}, False))
    assert not isinstance(answer, ErrorBody), answer


def report(w: World, node: str, *segments: SegmentStatus) -> None:
    """Let the node's loader report its link, and what it loads."""
    link = LinkStatus(link="remote:far", bytes_per_second=SPEED)
    w.send(
        LoaderStatusReceived(w.now, LoaderStatus(node=node, boot_id="b", bytes_per_second=1e9, links=(link,), segments=segments))
    )


def make(nodes: int = 1, **names: float | None) -> World:
    """Return a world of nodes with a slow link each, and models with an objective or none."""
    w = World()
    for n in range(nodes):
        w.node(f"n{n}", 2000 * MIB)
    for name, ttft in names.items():
        add(w, name, slo=Slo(ttft=ttft))
    for n in range(nodes):
        report(w, f"n{n}")
    return w


def plan_of(w: World, name: str) -> PlanRecord:
    plan = w.state.last_plan_of(name)
    assert plan is not None
    return plan


def segment_of(f: Fetch, fetched: int, total: int = WEIGHTS) -> SegmentStatus:
    return SegmentStatus(
        weights_id=f.weights_id,
        model=f.model,
        segment="s",
        total_bytes=total,
        loaded_bytes=fetched,
        fetched_bytes=fetched,
        holders=(f.holder,),
    )


def test_fetch_that_would_make_another_miss_its_objective_waits_and_is_named() -> None:
    w = make(tight=10.0, loose=None)
    w.demand("tight")
    [fetch] = w.state.fetches.values()
    assert (fetch.node, fetch.pending_bytes) == ("n0", WEIGHTS)
    w.demand("loose")
    assert not w.starts("loose")
    assert "n0's link: one fetch would miss its objective (tight)" in plan_of(w, "loose").reason
    w.get_ready("tight")
    w.tick(1)
    assert fetch.key not in w.state.fetches, "it ends when the instance is ready"
    assert len(w.starts("loose")) == 1


def test_another_node_is_taken() -> None:
    w = make(nodes=2, tight=10.0, loose=None)
    w.demand("tight")
    w.demand("loose")
    assert w.starts("loose")[0].node != w.starts("tight")[0].node
    [refused] = [c for c in plan_of(w, "loose").candidates if c.excluded]
    assert "link: one fetch would miss its objective" in (refused.excluded or "")


def test_fetches_without_an_objective_or_with_enough_time_refuse_none() -> None:
    w = make(first=None, roomy=60.0, last=None)
    for name in ("first", "roomy", "last"):
        w.demand(name)
        assert len(w.starts(name)) == 1


def test_fetch_that_is_late_anyway_refuses_none() -> None:
    w = make(late=1.0, loose=None)
    w.demand("late")
    w.demand("loose")
    assert len(w.starts("loose")) == 1


def test_reported_bytes_replace_the_predicted_ones() -> None:
    w = make(tight=10.0, loose=None)
    w.demand("tight")
    [fetch] = w.state.fetches.values()
    w.demand("loose")
    assert not w.starts("loose")
    w.now += 1
    report(w, "n0", segment_of(fetch, WEIGHTS - 10 * MIB))
    assert next(iter(w.state.fetches.values())).pending_bytes == 10 * MIB
    w.tick()
    assert len(w.starts("loose")) == 1, "10 MiB are there in time at half the speed"


def test_fetch_ends_with_its_last_byte() -> None:
    w = make(tight=10.0)
    w.demand("tight")
    [fetch] = w.state.fetches.values()
    report(w, "n0", segment_of(fetch, WEIGHTS))
    assert not w.state.fetches


def test_fetch_ends_with_its_instance() -> None:
    w = make(tight=10.0)
    w.demand("tight")
    w.demand("tight", 0)
    assert not w.state.fetches


def test_new_leader_learns_fetches_from_the_loaders_reports() -> None:
    w = make(tight=10.0, loose=None)
    w.demand("tight")
    [fetch] = w.state.fetches.values()
    w.state.fetches.clear()
    w.state.fetches_on.clear()
    report(w, "n0", segment_of(fetch, MIB))
    [again] = w.state.fetches.values()
    assert (again.deadline, again.pending_bytes) == (fetch.deadline, WEIGHTS - MIB)


def test_starving_model_is_not_kept_off_a_link() -> None:
    w = make(tight=1000.0, loose=None)
    w.demand("tight")
    [fetch] = w.state.fetches.values()
    w.send(
        LoaderStatusReceived(
            w.now, LoaderStatus(node="n0", boot_id="b", links=(LinkStatus(link="remote:far", bytes_per_second=WEIGHTS / 900),))
        )
    )
    w.demand("loose")
    assert not w.starts("loose")
    for _ in range(int(w.policy.starve_after_s) + 1):
        w.now += 1
        w.demand("tight")
        w.demand("loose")
        w.tick()
    assert fetch.key in w.state.fetches
    assert len(w.starts("loose")) == 1


def test_smaller_part_is_fetched_over_a_link_that_has_no_room_for_the_whole() -> None:
    """Both nodes fetch for a tight objective: only a stage's part leaves them in time."""
    w = make(nodes=2, a=14.0, b=14.0, m=12.0)
    w.demand("a")
    w.demand("b")
    assert {f.node for f in w.state.fetches.values()} == {"n0", "n1"}
    w.demand("m")
    chosen = plan_of(w, "m").chosen
    assert chosen is not None
    assert (chosen.ready_by, chosen.stages) == ("pipeline", 2)
    [parts] = {f.pending_bytes for f in w.state.fetches.values() if f.model == "m"}
    assert parts < WEIGHTS
    assert "link: one fetch would miss its objective" in " ".join(c.excluded or "" for c in plan_of(w, "m").candidates)


def test_group_whose_parts_have_no_room_on_a_link_is_named() -> None:
    w = make(nodes=2, a=9.0, b=9.0, m=12.0)
    w.demand("a")
    w.demand("b")
    w.demand("m")
    assert not w.starts("m")
    groups = {c.stages: c.excluded for c in plan_of(w, "m").candidates if c.ready_by == "pipeline"}
    assert set(groups) == {2, 3, 4}
    assert all("link: one fetch would miss its objective" in (why or "") for why in groups.values())
