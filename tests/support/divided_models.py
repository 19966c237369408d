"""Models that the scheduler divides into the stages of a group, in the tests' world."""

from __future__ import annotations

from typing import Any

from services.scheduler.domain.cost.learned import Parameter
from services.scheduler.domain.estimates.token_times import TOKEN
from services.scheduler.domain.events import AddModelsRequested
from services.scheduler.domain.state.accounting import booking_of
from services.scheduler.domain.state.changes import Put, apply
from services.scheduler.domain.state.measurements import ANYWHERE, Estimate
from shared.contracts.base import ErrorBody
from shared.contracts.loader import LinkStatus
from shared.contracts.model_info import LayerSizes
from shared.contracts.models import ModelSpec, Slo
from shared.contracts.node import InstanceState
from shared.contracts.plans import Candidate
from shared.errors import EngineFailed
from tests.support.fake_node import MIB, model_info
from tests.unit.scheduler.fake_agents import Running
from tests.unit.scheduler.world import World

WEIGHTS = 158 * MIB
SPEED = 20 * MIB
"""Bandwidth of a node's link to the remote source: the model takes 7.9 s, half of it 4 s."""


def make(
    ttft: float | None,
    *,
    nodes: int = 4,
    speeds: tuple[float, ...] = (),
    kind: str = "llama",
    budget: int = 1000 * MIB,
    **options: Any,
) -> World:
    """Return a world whose nodes have a slow link each, and a remote model with an objective."""
    w = World()
    for n in range(nodes):
        w.node(f"n{n}", budget)
    if ttft is not None:
        options.setdefault("slo", Slo(ttft=ttft))
    spec = ModelSpec(name="m", source="http://far/m", max_concurrency=1, **options)
    layers = LayerSizes(count=12, embedding_bytes=MIB, layer_bytes=13 * MIB, head_bytes=MIB)
    info = model_info(spec.source, WEIGHTS).model_copy(update={"layers": layers, "model_type": kind})
    answer = w.admin(AddModelsRequested(w.now, "add", (spec,), {"m": info}, False))
    assert not isinstance(answer, ErrorBody), answer
    for n in range(nodes):
        speed = speeds[n] if speeds else SPEED
        w.loader(f"n{n}", (), bytes_per_second=1e9, links=(LinkStatus(link="remote:far", bytes_per_second=speed),))
    return w


def with_token_time(w: World, ms: float) -> World:
    """Let the model's engine have measured its time per token."""
    apply(w.state, [Put(Estimate("m", ANYWHERE, {TOKEN: Parameter(ms, 0.0, 5)}))])
    return w


def chosen(w: World) -> Candidate:
    plan = w.state.last_plan_of("m")
    assert plan is not None
    assert plan.chosen is not None
    return plan.chosen


def others(w: World) -> dict[int, Candidate]:
    """Return the groups that were considered and not taken, by their stages."""
    plan = w.state.last_plan_of("m")
    assert plan is not None
    return {c.stages: c for c in plan.candidates if c.stages > 1 and c.excluded}


def divided(ms: float = 55.0, *, nodes: int = 2, **options: Any) -> World:
    """Return a world with a model whose time per token two low-memory workers make too long."""
    w = with_token_time(make(6.0, nodes=nodes, slo=Slo(ttft=6.0, tpot=0.1), **options), ms)
    w.demand("m")
    return w


def promised(w: World) -> dict[str, int]:
    """Return the promised bytes by device."""
    found = {key: b.promised_bytes for key, b in w.state.bookings.items() if b.promised_bytes}
    assert found == {f.device: f.reserve_bytes for f in w.state.full_workers.values() if f.used_by is None}
    return found


def serving(w: World) -> list[Running]:
    w.get_ready("m")
    w.demand("m", 0, in_flight=1)
    first = next(r for r in w.of("m") if r.group is not None and r.group.index == 0)
    first.active = 1
    w.report()
    return [r for r in w.of("m") if r.group is not None]


def fill(w: World) -> None:
    """Fill the free memory of all devices with instances that are kept."""
    for n in w.agents:
        free = booking_of(w.state, n, "cpu:0").free_bytes
        w.model(f"on-{n}", weights=free - 230 * MIB, placement={"devices": [f"{n}/*"]}, replicas={"min": 1}, pin=True)
        w.get_ready(f"on-{n}")
        assert w.of(f"on-{n}", InstanceState.READY), n


def begin_successor(w: World) -> Running:
    """Return the instance that replaces the group, while it loads in the promised memory."""
    w.tick(3.0)
    [one] = [r for r in w.of("m", InstanceState.LOADING) if r.group is None]
    assert one.command.instance_id in w.agents["n0"].instances
    assert not promised(w)
    return one


def fail(w: World, one: Running) -> None:
    one.state, one.error = InstanceState.FAILED, EngineFailed("it ended").body()
    w.report()
    w.finish_stops()
