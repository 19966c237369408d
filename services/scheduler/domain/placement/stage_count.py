"""Choose the number of stages of a cold start: HydraServe's Algorithm 1, live.

A model whose weights no near node has is fetched over the link of one node, or divided among
several. A group costs more memory and a hop for each token and stage, so that it is never taken for
its own sake (ADR 0079). The code carries the numbers of these rules:

1. Only models that the builtin engine can run in stages, that have an objective for the first token
   and no `stages` of their own, are divided, and only for requests that wait.
2. Stages go to different nodes that would fetch their part from the remote source, each with room
   now. The start of a group takes as long as its slowest node, each with the bytes of its part,
   and a hop for each stage (Eq. 1 and 5, with the cost model's learned parameters).
3. If one worker meets the objective, or a group is not predicted sooner, there is one worker.
4. Of the groups that meet the objective Algorithm 1 takes the one that shares the fewest devices,
   then the one with the least memory. If none meets it, there is one worker.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from services.scheduler.domain.cost.cost import Cost
from services.scheduler.domain.estimates.memory_needs import start_bytes
from services.scheduler.domain.estimates.start_times import Forecast, Prediction
from services.scheduler.domain.placement.groups import card_of_parts
from services.scheduler.domain.placement.options import FeasiblePlacement
from services.scheduler.domain.placement.request import PlacementRequest
from services.scheduler.domain.placement.victims import device_view
from services.scheduler.domain.policies.pipelines import STAGES, Scheme, Server, Times, select, slowdown
from services.scheduler.domain.policies.port import Option
from services.scheduler.domain.state.booking import Booking, device_key
from services.scheduler.domain.state.transaction import Transaction
from shared.contracts.models import ModelCard
from shared.contracts.plans import Candidate
from shared.contracts.stages import STAGEABLE

HOP_S = 0.001
"""t_n of HydraServe, as in its artifact (algs.py): 1 ms for each stage."""


class StageChoice(NamedTuple):
    """The group to offer, if any, and those that are not, each with the reason."""

    offered: tuple[FeasiblePlacement, ...] = ()
    refused: tuple[tuple[FeasiblePlacement, str], ...] = ()


class _Place(NamedTuple):
    """A device that has room for a stage."""

    booking: Booking
    prediction: Prediction
    sharing: int


def choose_stage_count(tx: Transaction, r: PlacementRequest, considered: Sequence[Candidate | FeasiblePlacement]) -> StageChoice:
    """Return the groups of stages of a model, by their number.

    Args:
        tx: The decision's transaction.
        r: The model, and where it may go.
        considered: The options of one worker, and devices without room for one.
    """
    card, objective = r.model.card, r.model.card.spec.slo.ttft
    if objective is None or not _may_be_divided(tx, r):  # 1
        return StageChoice()
    alone = min((c for c in considered if isinstance(c, FeasiblePlacement)), key=lambda p: p.option.cost.total_s, default=None)
    layers = card.info.layers.count if card.info.layers is not None else 0
    found = [g for s in range(2, min(STAGES, layers) + 1) if (g := _group(tx, r, s)) is not None]
    first_s = alone.option.cost.total_s + r.ask.exec_s if alone is not None else math.inf
    left_s = objective - r.ask.waited_s
    if first_s <= left_s:  # 3
        why = f"one worker meets the objective of {objective:g} s: it is predicted to take {first_s:.2f} s"
        return StageChoice(refused=tuple((g, why) for g, _ in found))
    sooner = [(g, x) for g, x in found if x.ttft < first_s]
    single = [Scheme(1, 1, (), first_s, 0.0)] if alone is not None else []
    best = select([*single, *(x for _, x in sooner)], left_s, math.inf)  # 4
    offered = tuple(g for g, x in sooner if x is best)
    refused = [(g, _why_not(x, best, first_s, left_s, objective)) for g, x in found if x is not best]
    return StageChoice(offered, tuple(refused))


def _why_not(x: Scheme, best: Scheme | None, first_s: float, left_s: float, objective: float) -> str:
    if x.ttft >= first_s:
        return "a group of this size is not predicted sooner than one worker"
    if x.ttft > left_s:
        return f"misses the objective of {objective:g} s"
    return f"{best.stages} stages meet the objective too, with less sharing or memory" if best is not None else "not needed"


def _may_be_divided(tx: Transaction, r: PlacementRequest) -> bool:
    """True if the model's next instance may be a group without the operator's wish.

    An objective for each further token needs a measured time per token, which the scheduler does
    not have yet.
    """
    spec, info = r.model.card.spec, r.model.card.info
    return (
        "pipeline" in tx.policy.capabilities & r.profile.uses
        and not r.ask.is_extra
        and spec.stages == 1
        and spec.slo.tpot is None
        and r.forecast.is_remote
        and spec.engine == "builtin"
        and spec.isolation != "shared"
        and not (spec.park or spec.trust_remote_code or spec.base or spec.memory)
        and info.task == "generate"
        and info.model_type in STAGEABLE
        and info.layers is not None
        and not any(m.card.spec.base == r.model.key for m in tx.state.models.values())
    )


def _group(tx: Transaction, r: PlacementRequest, stages: int) -> tuple[FeasiblePlacement, Scheme] | None:
    """Return the soonest group of that many nodes; None: too few have room."""
    card = r.model.card.in_stages(stages)
    need = -(-start_bytes(tx.state, card) // stages)
    places = sorted(_best_of_nodes(tx, r, card, need), key=lambda x: _rank(r, x))[:stages]  # 2
    if len(places) < stages:
        return None
    slowest = max((p.prediction for p in places), key=lambda p: p.ms)
    # A stage alone on its device computes its layers only, as a full worker of Eq. 1 and 2 does.
    undisturbed = sum(1 for p in places if not p.sharing)
    t = Times(prefill=r.ask.exec_s, decode=0.0, hop=HOP_S)
    ready_s = slowest.cost.total_s + t.hop * stages
    cost = Cost(ready_s, slowest.cost.phases, slowest.cost.spread_s)
    views = tuple(device_view(tx, p.booking, failed=p.booking.key in r.avoid) for p in places)
    servers = tuple(_server(p) for p in places)
    memory = stages * need / max(1, start_bytes(tx.state, r.model.card))
    scheme = Scheme(stages, 0, servers, ready_s + t.prefill * slowdown(stages, undisturbed), 0.0, memory_needs=memory)
    option = Option(
        views, "pipeline", cost, source=slowest.source, stages=stages, full_workers=0, sharing=sum(p.sharing for p in places)
    )
    first, *later = (p.booking for p in places)
    placed = FeasiblePlacement(option, first.node, (first.device_id,), need, slowest)
    return placed._replace(later=tuple(b.key for b in later), is_wished=False), scheme


def _best_of_nodes(tx: Transaction, r: PlacementRequest, card: ModelCard, need: int) -> list[_Place]:
    """Return the soonest device with room of each node that fetches its part."""
    part = Forecast(tx.state, card_of_parts(card, 1), tx.now)
    found: list[_Place] = []
    for node in tx.state.nodes.values():
        if not part.fetches(node.name):
            continue
        there = [
            _Place(b, part.predict(b, leaving=False), _count_sharing(tx, b))
            for device in node.devices
            if (b := tx.state.bookings.get(device_key(node.name, device.device_id))) is not None and _has_room(tx, r, b, need)
        ]
        if there:
            found.append(min(there, key=lambda x: _rank(r, x)))
    return found


def _count_sharing(tx: Transaction, b: Booking) -> int:
    """Return the instances and the stages of groups on a device."""
    return len(tx.state.on_device(b.node, b.device_id)) + len(tx.state.stages_on.get(b.key, ()))


def _rank(r: PlacementRequest, x: _Place) -> tuple[object, ...]:
    return x.booking.key in r.avoid, x.prediction.ms, x.sharing, -x.booking.free_bytes, x.booking.key


def _has_room(tx: Transaction, r: PlacementRequest, b: Booking, need: int) -> bool:
    """True if a stage can start there now. Nothing is cleared for a stage."""
    if b.closed_reason or need > b.free_bytes or (r.excludes is not None and r.excludes(b)):
        return False
    return not (r.has_cooldowns and tx.is_cooling_down(b.key))


def _server(p: _Place) -> Server:
    b = p.booking
    network = b.remote_bytes_per_second or b.bytes_per_second or math.inf
    return Server(b.key, b.node, b.free_bytes, network, math.inf, p.sharing)
