"""Choose the number of stages of a cold start: HydraServe's Algorithm 1, live.

A model whose weights no near node has is fetched over the link of one node, or divided among
several. A group costs more memory and a hop for each token and stage, so that it is never taken for
its own sake (ADR 0079). The code carries the numbers of these rules:

1. Only models that the builtin engine can run in stages, that have an objective for the first token
   and no `stages` of their own, are divided, and only for requests that wait.
2. Stages go to different nodes that would fetch their part from the remote source, each with room
   or with victims that make room. The start of a group takes as long as its slowest node, each with
   the bytes of its part, and a hop for each stage (Eq. 1 and 5, with the cost model's learned
   parameters).
3. If one worker meets the objective, or a group is not predicted sooner, there is one worker.
   A model with an objective for each further token is divided once the time per token of one engine
   is measured. At worst the stages of low-memory workers take it one after the other (Eq. 2).
4. Of the groups that meet the objectives Algorithm 1 takes the one that shares the fewest devices,
   then the one with the least memory. If none meets it, there is one worker.
5. Full workers (w of the s stages) are considered only for an objective for each further token,
   since they cost memory: their devices are promised the memory of the instance that replaces the
   group (ADR 0108). Such a device has that memory free and no other instance. Eq. 2 counts it as
   one that computes its stage undisturbed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from services.scheduler.domain.estimates.memory_needs import start_bytes
from services.scheduler.domain.estimates.start_times import Forecast
from services.scheduler.domain.estimates.token_times import token_s
from services.scheduler.domain.placement.groups import card_of_parts
from services.scheduler.domain.placement.link_rule import link_rule
from services.scheduler.domain.placement.options import FeasiblePlacement, excluded_candidate
from services.scheduler.domain.placement.request import PlacementRequest
from services.scheduler.domain.placement.stage_places import StagePlace, clear_all, find_stage_places, place_group
from services.scheduler.domain.policies.pipelines import STAGES, Scheme, Server, Times, select, slowdown, tpot
from services.scheduler.domain.policies.port import NOTHING_TO_CLEAR, Clearance
from services.scheduler.domain.state.transaction import Transaction
from services.scheduler.domain.values import replace
from shared.contracts.models import Slo
from shared.contracts.plans import Candidate
from shared.contracts.stages import STAGEABLE

HOP_S = 0.001
"""t_n of HydraServe, as in its artifact (algs.py): 1 ms for each stage."""


class StageChoice(NamedTuple):
    """The group to offer, if any, and those that are not, each with the reason."""

    offered: tuple[FeasiblePlacement, ...] = ()
    refused: tuple[tuple[FeasiblePlacement, str], ...] = ()
    excluded: tuple[Candidate, ...] = ()
    """Groups for which the links of too few nodes have room."""


def choose_stage_count(tx: Transaction, r: PlacementRequest, considered: Sequence[Candidate | FeasiblePlacement]) -> StageChoice:
    """Return the groups of stages of a model, by their number.

    Args:
        tx: The decision's transaction.
        r: The model, and where it may go.
        considered: The options of one worker, and devices without room for one.
    """
    card, slo = r.model.card, r.model.card.spec.slo
    objective = slo.ttft
    if objective is None or not _may_be_divided(tx, r):  # 1
        return StageChoice()
    alone = min((c for c in considered if isinstance(c, FeasiblePlacement)), key=lambda p: p.option.cost.total_s, default=None)
    layers = card.info.layers.count if card.info.layers is not None else 0
    sizes = (r.burst_stages,) if r.burst_stages else range(2, min(STAGES, layers) + 1)
    groups = [_list_groups(tx, r, s) for s in sizes]
    found = [g for g in groups if isinstance(g, list)]
    excluded = tuple(g for g in groups if isinstance(g, Candidate))
    first_s = alone.option.cost.total_s + r.ask.exec_s if alone is not None else math.inf
    left_s = objective - r.ask.waited_s
    if first_s <= left_s:  # 3
        why = f"one worker meets the objective of {objective:g} s: it is predicted to take {first_s:.2f} s"
        return StageChoice(refused=tuple((g[0].placed, why) for g in found), excluded=excluded)
    sooner = [g for of_size in found for g in of_size if g.scheme.ttft < first_s]
    single = [Scheme(1, 1, (), first_s, _decode_s(tx, r))] if alone is not None else []
    best = select([*single, *(g.scheme for g in sooner)], left_s, slo.tpot or math.inf)  # 4
    offered = tuple(g.placed for g in sooner if g.scheme is best)
    others = [_nearest(of_size, slo) for of_size in found if all(g.scheme is not best for g in of_size)]
    refused = tuple((g.placed, _why_not(g.scheme, best, first_s, left_s, slo)) for g in others)
    return StageChoice(offered, refused, excluded)


class _Group(NamedTuple):
    """A group of s stages, w of them full workers."""

    placed: FeasiblePlacement
    scheme: Scheme


def _nearest(of_size: list[_Group], slo: Slo) -> _Group:
    """Return the group of a size that is recorded.

    It has the least memory that meets the objective for each further token, else the least time.
    """
    within = [g for g in of_size if slo.tpot is None or g.scheme.tpot <= slo.tpot]
    return within[0] if within else min(of_size, key=lambda g: g.scheme.tpot)


def _why_not(x: Scheme, best: Scheme | None, first_s: float, left_s: float, slo: Slo) -> str:
    if x.ttft >= first_s:
        return "a group of this size is not predicted sooner than one worker"
    if x.ttft > left_s:
        return f"misses the objective of {slo.ttft:g} s"
    if slo.tpot is not None and x.tpot > slo.tpot:
        full = f", with {x.full} full {'worker' if x.full == 1 else 'workers'}, as many as have room" if x.full < x.stages else ""
        ms = f"{x.tpot * 1e3:.0f} ms for each further token{full}"
        return f"may take {ms}, which misses the objective of {slo.tpot * 1e3:g} ms"
    return f"{best.stages} stages meet the objective too, with less sharing or memory" if best is not None else "not needed"


def _may_be_divided(tx: Transaction, r: PlacementRequest) -> bool:
    """True if the model's next instance may be a group without the operator's wish.

    An objective for each further token needs a measured time per token.
    """
    spec, info = r.model.card.spec, r.model.card.info
    return (
        "pipeline" in tx.policy.capabilities & r.profile.uses
        and (r.burst_stages > 0 or not r.ask.is_extra)
        and spec.stages == 1
        and (spec.slo.tpot is None or token_s(tx.state, r.model.key) is not None)
        and r.forecast.is_remote
        and spec.engine == "builtin"
        and spec.isolation != "shared"
        and not (spec.park or spec.trust_remote_code or spec.base or spec.memory)
        and info.task == "generate"
        and info.model_type in STAGEABLE
        and info.layers is not None
        and not any(m.card.spec.base == r.model.key for m in tx.state.models.values())
    )


def _decode_s(tx: Transaction, r: PlacementRequest) -> float:
    """Return t_d; 0 without an objective for each further token."""
    measured = token_s(tx.state, r.model.key) if r.model.card.spec.slo.tpot is not None else None
    return measured or 0.0


def _list_groups(tx: Transaction, r: PlacementRequest, stages: int) -> list[_Group] | Candidate | None:
    """Return the soonest groups of that many nodes, by their full workers, or the link that refuses
    them; None: too few nodes can have a stage.
    """
    card = r.model.card.in_stages(stages)
    need = -(-start_bytes(tx.state, card) // stages)
    part = Forecast(tx.state, card_of_parts(card, 1), tx.now)
    stage = replace(r, model=replace(r.model, card=card), need_bytes=need, devices=1, forecast=part)
    stage = replace(stage, link=link_rule(tx, part) if r.link is not None else None)
    possible = sorted((p for p in find_stage_places(tx, stage, part) if part.fetches(p.booking.node)), key=lambda p: p.rank(r))
    roomy = _list_roomy(tx, r, possible, need)
    found: list[_Group] = []
    for full in range(min(stages, len(roomy)) + 1):
        places = _choose_places(possible, roomy[:full], stages)  # 2
        if len(places) == stages and (clearance := clear_all(places)) is not None:
            found.append(_predict(tx, r, part, places, clearance, need, full))
    return found or _refused_by_link(tx, stage, stages)


def _list_roomy(tx: Transaction, r: PlacementRequest, places: Sequence[StagePlace], need: int) -> list[StagePlace]:
    """Return the places that can have a full worker, one of each node (5)."""
    if r.model.card.spec.slo.tpot is None or not tx.policy.consolidate:
        return []
    found: dict[str, StagePlace] = {}
    for p in places:
        b = p.booking
        if p.sharing or p.fit.clearance is not NOTHING_TO_CLEAR or b.node in found:
            continue
        if b.free_bytes >= need + start_bytes(tx.state, r.model.card, b.device_id.partition(":")[0]):
            found[b.node] = p
    return list(found.values())


def _choose_places(ranked: Sequence[StagePlace], full: Sequence[StagePlace], stages: int) -> list[StagePlace]:
    """Return the full workers, and the best places of other nodes behind them."""
    chosen = {p.booking.node: p for p in full}
    for p in ranked:
        if len(chosen) == stages:
            break
        chosen.setdefault(p.booking.node, p)
    return list(chosen.values())


def _predict(
    tx: Transaction,
    r: PlacementRequest,
    part: Forecast,
    places: list[StagePlace],
    clearance: Clearance,
    need: int,
    full: int,
) -> _Group:
    """Return a group, of which the first `full` places are full workers."""
    stages, whole = len(places), max(1, start_bytes(tx.state, r.model.card))
    leaving = clearance is not NOTHING_TO_CLEAR
    slowest = max((part.predict(p.booking, leaving=leaving) for p in places), key=lambda p: p.ms)
    # A stage alone on its device computes its layers only, as a full worker of Eq. 1 and 2 does.
    undisturbed = sum(1 for p in places if not p.sharing)
    t = Times(prefill=r.ask.exec_s, decode=_decode_s(tx, r), hop=HOP_S)
    tpot_s = tpot(stages, full, t)
    placed = place_group(places, clearance, slowest, need, hops_s=t.hop * stages, tpot_s=tpot_s, full_workers=full, is_wished=False)
    ttft = placed.option.cost.total_s + t.prefill * slowdown(stages, undisturbed)
    memory = full + stages * need / whole
    return _Group(placed, Scheme(stages, full, tuple(_server(p) for p in places), ttft, tpot_s, memory_needs=memory))


def _refused_by_link(tx: Transaction, stage: PlacementRequest, stages: int) -> Candidate | None:
    """Return the record of a group that other fetches keep off a node's link; None: none does."""
    bookings = tx.state.bookings.values() if stage.link is not None else ()
    for b in bookings:
        if stage.link is not None and (why := stage.link(b)):
            there = excluded_candidate(b, stage.need_bytes, why)
            return there.model_copy(update={"ready_by": "pipeline", "stages": stages, "full_workers": 0})
    return None


def _server(p: StagePlace) -> Server:
    b = p.booking
    network = b.remote_bytes_per_second or b.bytes_per_second or math.inf
    return Server(b.key, b.node, b.free_bytes, network, math.inf, p.sharing)
