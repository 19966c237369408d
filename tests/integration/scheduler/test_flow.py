"""From demand to ready and back to zero instances, on real NATS and Postgres."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from services.scheduler import handlers
from shared.contracts import subjects
from shared.contracts.admin import (
    AddModels,
    ChangeNode,
    ExplainPlan,
    ModelAsleep,
    ModelAwake,
    ModelsAdded,
    PlanExplained,
    RemoveModel,
    SleepModel,
    WakeModel,
)
from shared.contracts.base import Done
from shared.contracts.loader import PrepareWeights
from shared.contracts.models import ModelSpec
from shared.contracts.node import InstanceState, StopInstance
from shared.contracts.traces import LoadTrace
from shared.errors import (
    CheckpointInvalid,
    Conflict,
    EngineFailed,
    InsufficientMemory,
    InvalidModel,
    InvalidRequest,
    ModelNotFound,
    NotFound,
    Unavailable,
)
from shared.messaging.responders import CONCURRENT_HANDLERS
from tests.integration.scheduler.conftest import Site, spec
from tests.integration.scheduler.queries import catalogue, plan_of, ready
from tests.support.fake_node import MIB, FakeNode

TWO_MODELS = 700 * MIB


async def up(site: Site, node: FakeNode, model: str) -> None:
    """Start a model; it has served and is idle."""
    await site.demand(model, 1)
    await site.until(lambda: ready(node, model))
    await site.demand(model, 0)
    await node.load(model, 1)
    await node.load(model, 0)


async def test_demand_starts_one_instance_and_records_measurements_in_its_plan(site: Site) -> None:
    site.scheduler()
    node = await site.node()
    await site.add(spec("a"))
    noted = await asyncio.gather(*(site.demand("a", 3, gateway=f"g{i}") for i in range(100)))
    assert {n.outlook for n in noted} <= {"starting", "ready"}
    assert all(n.eta_ms is not None for n in noted)
    await site.until(lambda: ready(node, "a"))
    (start,) = node.starts("a")
    assert [type(c) for c in node.commands if isinstance(c, PrepareWeights)] == [PrepareWeights]
    assert start.traceparent is not None

    async def measured() -> bool:
        return (await plan_of(site, "a")).outcome == "ready"

    await site.until(measured)
    plan = await plan_of(site, "a")
    assert plan.measured_ms is not None
    assert {"schedule", "load"} <= {s.phase.value for s in plan.measured}
    assert plan.traceparent == start.traceparent
    assert plan.chosen is not None
    assert plan.chosen.predicted["load"] > 0
    assert (await site.demand("a", 1)).outlook == "ready"


async def test_the_load_is_traced(site: Site) -> None:
    site.scheduler()
    node = await site.node()
    await site.add(spec("a"))
    waiter = "00-" + "a" * 32 + "-" + "b" * 16 + "-01"
    await site.demand("a", 1, traceparents=(waiter,))
    await site.until(lambda: ready(node, "a"))
    js = site.mesh.nc.jetstream()
    plan = await plan_of(site, "a")

    async def kept() -> LoadTrace | None:
        messages = await js.subscribe(subjects.load_trace(plan.plan_id), ordered_consumer=True)
        try:
            return LoadTrace.model_validate_json((await messages.next_msg(timeout=60)).data)
        finally:
            await messages.unsubscribe()

    trace = await kept()
    assert trace is not None
    assert (trace.model, trace.outcome, trace.waiters) == ("a", "ready", ("a" * 32,))
    assert trace.trace_id == (node.starts("a")[0].traceparent or "").split("-")[1]
    assert sum(s.duration_ms for s in trace.critical_path) == pytest.approx(trace.duration_ms)


async def test_three_models_share_a_device_with_room_for_two(site: Site) -> None:
    site.scheduler()
    node = await site.node(budget=TWO_MODELS)
    # The cost of an eviction depends on the measured start-up time, which varies on a busy machine.
    await site.add(spec("a"), spec("b", latency_sensitivity=100), spec("c"))
    for name in ("a", "b"):
        await up(site, node, name)
    await site.demand("c", 1)
    await site.until(lambda: ready(node, "c"))
    assert not node.of("a"), "the one that is cheaper to evict has left"
    assert ready(node, "b")
    plan = await plan_of(site, "c")
    assert plan.way == "evict_then_load"
    assert plan.chosen is not None
    assert plan.chosen.victims[0].startswith("a (")
    assert "reserve" in {s.phase.value for i in node.of("c") for s in i.phases}


async def test_a_serving_model_is_drained_only_when_another_waits_too_long(site: Site) -> None:
    site.scheduler(preempt_after=0.5)
    node = await site.node(budget=TWO_MODELS)
    await site.add(spec("a"), spec("b", pin=True), spec("c"))
    await up(site, node, "a")
    await up(site, node, "b")
    await node.load("a", 1)

    async def serves() -> bool:
        return any(i.model == "a" and i.load.active for n in (await site.view()).nodes for i in n.instances)

    await site.until(serves)
    assert (await site.demand("c", 1)).outlook == "waiting"
    await site.until(lambda: any(i.state is InstanceState.DRAINING for i in node.of("a")))
    assert not node.starts("c")
    assert ready(node, "b")
    await node.load("a", 0)
    await site.until(lambda: ready(node, "c"))


async def test_wake_sleep_and_remove(site: Site) -> None:
    site.scheduler()
    node = await site.node()
    await site.add(spec("a", aliases=("alias",)))
    awake: ModelAwake = await site.ask(WakeModel(name="alias"), ModelAwake)
    assert awake.instance_id in node.instances
    assert (await plan_of(site, "alias")).trigger == "wake"
    asleep: ModelAsleep = await site.ask(SleepModel(name="a"), ModelAsleep)
    assert asleep.instances == (awake.instance_id,)
    assert asleep.freed_bytes == node.instances[awake.instance_id].command.reserve_bytes
    node.fail_starts = [CheckpointInvalid("bad shard").body()]
    with pytest.raises(CheckpointInvalid, match="bad shard"):
        await site.ask(WakeModel(name="a"), ModelAwake)
    view = await site.view()
    assert view.models[0].error == "bad shard"
    await site.ask(WakeModel(name="a"), ModelAwake)
    assert (await site.view()).models[0].error is None
    await site.ask(RemoveModel(name="a"), Done)
    await site.until(lambda: not node.of("a"))
    with pytest.raises(ModelNotFound):
        await site.ask(WakeModel(name="a"), ModelAwake)
    await catalogue_has(site, lambda cards: not cards)


async def test_view_does_not_wait_behind_operators_who_wait_for_a_model(site: Site) -> None:
    site.scheduler()
    node = await site.node(hold_starts=asyncio.Event())
    await site.add(spec("a"))
    wakes = [asyncio.create_task(site.ask(WakeModel(name="a"), ModelAwake)) for _ in range(CONCURRENT_HANDLERS + 10)]
    await site.until(lambda: bool(node.starts("a")))
    await site.mesh.flush()
    assert [m.card.name for m in (await site.view()).models] == ["a"]
    assert node.hold_starts is not None
    node.hold_starts.set()
    assert len({awake.instance_id for awake in await asyncio.gather(*wakes)}) == 1


async def test_operators_beyond_the_limit_are_refused(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.scheduler()
    node = await site.node(hold_starts=asyncio.Event())
    await site.add(spec("a"))
    monkeypatch.setattr(handlers, "MAX_CHANGES", 1)
    wake = asyncio.create_task(site.ask(WakeModel(name="a"), ModelAwake))
    await site.until(lambda: bool(node.starts("a")))
    with pytest.raises(Unavailable, match="1 requests of operators wait"):
        await site.mesh.request(subjects.ADMIN, SleepModel(name="a"), ModelAsleep)
    assert node.hold_starts is not None
    node.hold_starts.set()
    await wake
    await site.ask(SleepModel(name="a"), ModelAsleep)


async def catalogue_has(site: Site, condition: Callable[[dict[str, Any]], bool]) -> None:
    """Wait until the catalogue is as wanted.

    It is written after the reply, and a read during a write may lack the model that is written.
    """

    async def has() -> bool:
        return condition(await catalogue(site))

    await site.until(has)


async def test_registration_of_several_models_is_all_or_nothing(site: Site) -> None:
    site.scheduler()
    node = await site.node(sizes={"/models/huge": 2000 * MIB})
    added = await site.add(spec("a", aliases=("x",)), spec("b"))
    assert added.added == ("a", "b")
    faults: list[tuple[tuple[Any, ...], type[Exception], str]] = [
        ((spec("c"), spec("c")), InvalidRequest, "Named twice: c"),
        ((spec("c", aliases=("x",)),), Conflict, r"'x' \(a and c\)"),
        ((spec("x"),), Conflict, "'x'"),
        ((spec("c"), spec("broken")), InvalidModel, "a shard is missing"),
        ((spec("c"), spec("huge")), InsufficientMemory, "huge needs"),
    ]
    for specs, error, words in faults:
        with pytest.raises(error, match=words):
            await site.ask(AddModels(specs=specs), ModelsAdded)
    await catalogue_has(site, lambda cards: set(cards) == {"a", "b"})
    before = len(node.commands)
    again: ModelsAdded = await site.ask(AddModels(specs=(spec("a", keep_alive=9), spec("b")), prune=True), ModelsAdded)
    assert (again.changed, again.unchanged) == (("a",), ("b",))
    assert len(node.commands) == before, "files are not read again"
    await catalogue_has(site, lambda cards: "a" in cards and cards["a"].generation == 1)
    node.sizes["/models/b"] = 65 * MIB
    reread: ModelsAdded = await site.ask(AddModels(specs=(spec("a", keep_alive=9), spec("b")), reread=True), ModelsAdded)
    assert (reread.changed, reread.unchanged) == (("b",), ("a",)), "what changed at its source counts when it is registered again"
    await catalogue_has(site, lambda cards: "b" in cards and cards["b"].info.weights_bytes == 65 * MIB)
    node.out_of_reach = {"/models/b", "/models/c"}
    away: ModelsAdded = await site.ask(AddModels(specs=(spec("b"),), reread=True), ModelsAdded)
    assert away.unchanged == ("b",), "a source that is down does not take away what is known"
    with pytest.raises(Unavailable):
        await site.mesh.request(subjects.ADMIN, AddModels(specs=(spec("b"), spec("c")), reread=True), ModelsAdded)
    changed: ModelsAdded = await site.ask(AddModels(specs=(spec("a", max_model_len=512),), prune=True), ModelsAdded)
    assert (changed.changed, changed.removed) == (("a",), ("b",))
    await catalogue_has(site, lambda cards: set(cards) == {"a"} and cards["a"].generation == 2)


async def test_inspection_lost_by_nats_is_repeated(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handlers, "_INSPECT_AGAIN_MS", 1_000)
    site.scheduler()
    node = await site.node()
    node.hold_inspection = lost = asyncio.Event()
    added: ModelsAdded = await site.ask(AddModels(specs=(spec("a"),)), ModelsAdded)
    lost.set()
    assert added.added == ("a",)
    assert [c.kind for c in node.commands].count("inspect") >= 2


async def test_registration_with_another_source_is_refused(site: Site) -> None:
    site.scheduler()
    node = await site.node()
    await site.add(spec("a"))
    before = len(node.commands)
    other = ModelSpec(name="a", source="/models/other")
    with pytest.raises(Conflict, match="--replace"):
        await site.ask(AddModels(specs=(other,), reread=True), ModelsAdded)
    assert len(node.commands) == before
    replaced: ModelsAdded = await site.ask(AddModels(specs=(other,), replace=True), ModelsAdded)
    assert replaced.changed == ("a",)
    # Of concurrent registrations of one new name the first holds; a loader reads all files.
    rivals = [AddModels(specs=(ModelSpec(name="b", source=f"/models/b{n}"),)) for n in range(4)]
    answers = await asyncio.gather(*(site.ask(r, ModelsAdded) for r in rivals), return_exceptions=True)
    (winner,) = [n for n, answer in enumerate(answers) if isinstance(answer, ModelsAdded)]
    assert all(isinstance(answer, Conflict) for n, answer in enumerate(answers) if n != winner)
    await catalogue_has(site, lambda cards: "b" in cards and cards["b"].spec.source == f"/models/b{winner}")


async def test_failures_are_published_after_the_retries(site: Site) -> None:
    site.scheduler()
    one, two = await site.node(node="n1"), await site.node(node="n2")
    await site.add(spec("a"))
    one.fail_starts = [EngineFailed("boom").body()]
    two.fail_starts = [EngineFailed("boom").body()]
    await site.demand("a", 1)
    await site.until(lambda: bool(site.failed))
    assert site.failed[0].error.message == "boom"
    assert (len(one.starts()), len(two.starts())) == (1, 1)
    assert (await plan_of(site, "a")).trigger == "retry"
    await site.until(lambda: not one.of("a"))
    await site.demand("a", 1)
    await site.until(lambda: ready(one, "a") or ready(two, "a"))


async def test_cordoned_nodes_receive_no_instances_and_drained_nodes_are_emptied(site: Site) -> None:
    site.scheduler()
    one = await site.node(node="n1")
    await site.add(spec("a"))
    await site.ask(WakeModel(name="a"), ModelAwake)
    two = await site.node(node="n2")
    await site.ask(ChangeNode(node="n1", action="drain"), Done)
    await site.until(lambda: not one.of("a"))
    await site.ask(WakeModel(name="a"), ModelAwake)
    assert ready(two, "a")
    assert {n.node: n.cordoned for n in (await site.view()).nodes} == {"n1": True, "n2": False}
    with pytest.raises(NotFound, match="n9"):
        await site.ask(ChangeNode(node="n9", action="cordon"), Done)
    plan = await plan_of(site, "a")
    assert {c.node: c.excluded for c in plan.candidates}["n1"] == "the node is cordoned"
    same: PlanExplained = await site.ask(ExplainPlan(plan_id=plan.plan_id), PlanExplained)
    assert same.plan.plan_id == plan.plan_id


async def test_removed_node_is_gone_for_the_next_leader_too(site: Site) -> None:
    site.scheduler()
    await site.node(node="n1")
    two = await site.node(node="n2")
    await site.until(lambda: _nodes_are(site, {"n1", "n2"}))
    with pytest.raises(Conflict, match="thaw node drain n2"):
        await site.ask(ChangeNode(node="n2", action="remove"), Done)
    await two.stop()
    site.nodes.remove(two)

    async def is_lost() -> bool:
        return [n.node for n in (await site.view()).nodes if not n.alive] == ["n2"]

    await site.until(is_lost)
    await site.ask(ChangeNode(node="n2", action="remove"), Done)
    assert await _nodes_are(site, {"n1"})
    stop, task = site.schedulers.pop(0)
    stop.set()
    assert await task == 0
    site.scheduler()
    assert await _nodes_are(site, {"n1"})


async def _nodes_are(site: Site, names: set[str]) -> bool:
    return {n.node for n in (await site.view()).nodes} == names


async def test_cancelled_demand_cancels_the_start(site: Site) -> None:
    site.scheduler()
    node = await site.node(hold_starts=asyncio.Event())
    await site.add(spec("a"))
    await site.demand("a", 1)
    await site.until(lambda: bool(node.of("a")))

    async def gave_up() -> bool:
        await site.demand("a", 0)
        return any(isinstance(c, StopInstance) for c in node.commands)

    await site.until(gave_up)
    await site.until(lambda: not node.of("a"))


async def test_nodeagent_restart_keeps_its_instances(site: Site) -> None:
    site.scheduler()
    node = await site.node()
    await site.add(spec("a"))
    await site.ask(WakeModel(name="a"), ModelAwake)
    await node.restart()
    await node.publish()
    await node.publish()
    assert (await site.demand("a", 1)).outlook == "ready"
    assert len(node.starts("a")) == 1
