"""Decide where one more instance of a model goes. The code carries the numbers of these rules:

1. The model has failed and only `replicas.min` needs it: wait until its back-off is over.
2. No node is alive: wait. After `no_node_timeout_s` without one, its requests fail (`Unavailable`).
3. No device of a live node could hold the model even when empty: fail at once
   (`InsufficientMemory`). Wait for a node that could, if it is stopping or has been silent for less
   than `no_node_timeout_s`: it may restart.
4. A device has room. A suspended instance of the model is one more option, on its own devices, with
   the memory that it lacks. So is a suspended engine of another model of its template key.
5. A device has room once the stopping instances are gone: claim it.
6. A device has room once idle instances are evicted (victims.py): claim their memory. Shares of
   keys may keep some of them from the model, and let serving ones be drained for it.
7. The model has waited longer than `preempt_after_s`: as 6, but serving instances may be drained.
   If there is no option, then also those that shares of keys keep from it, except on devices
   where instances of its own keys leave for it in turn.
8. Otherwise the model waits, and the reason names the obstacles.

Everything that 4 to 7 allow is an option. The profile chooses the victims and the option
(policies/port.py). Of many devices only a shortlist is considered (shortlist.py). A model that has
waited for `starve_after_s` is placed by Thaw's own profile. An extra replica stops after 6 and
never displaces a model with demand. Pure: the state is only read.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import islice
from operator import attrgetter

from services.scheduler.domain.demand.key_shares import Standing, has_other_users, standing_of
from services.scheduler.domain.estimates.memory_needs import device_count, start_bytes
from services.scheduler.domain.estimates.start_times import Forecast, least_start_s
from services.scheduler.domain.formatting import gib
from services.scheduler.domain.placement.constraints import Excludes, combine_rules, confine_to, placement_rule
from services.scheduler.domain.placement.groups import group_options
from services.scheduler.domain.placement.link_rule import link_rule
from services.scheduler.domain.placement.options import (
    FeasiblePlacement,
    Shortfalls,
    device_sets,
    load_option,
    resume_options,
    template_options,
)
from services.scheduler.domain.placement.request import PlacementRequest
from services.scheduler.domain.placement.saturation import no_device_gets_room
from services.scheduler.domain.placement.shortlist import SHORTLIST_SIZE, shortlists
from services.scheduler.domain.placement.stage_count import choose_stage_count
from services.scheduler.domain.policies import thaw
from services.scheduler.domain.policies.port import NOTHING_TO_CLEAR, Ask
from services.scheduler.domain.state.booking import Booking, device_key
from services.scheduler.domain.state.entities import Model
from services.scheduler.domain.state.transaction import Transaction
from services.scheduler.domain.state.volatile import Presence
from services.scheduler.domain.values import create_unchecked, replace, value
from shared.contracts.models import ModelCard
from shared.contracts.plans import Candidate, Way
from shared.errors import InsufficientMemory, ThawError, Unavailable
from shared.sizing import need_of

_name = attrgetter("node", "device_ids", "stages")


@value(frozen=True, slots=True)
class Placement:
    """A decision: start the chosen candidate, or wait.

    Attributes:
        reason: Why it was chosen, or why the model waits.
        chosen: The candidate to start; None: wait.
        error: Refuses the waiting requests; None: they wait on.
    """

    way: Way
    reason: str
    candidates: tuple[Candidate, ...] = ()
    chosen: Candidate | None = None
    victims: tuple[str, ...] = ()
    error: ThawError | None = None
    resume: str | None = None
    """The suspended instance that resumes."""
    shortfalls: Shortfalls = ()
    """Devices that the victims clear, each with the bytes that they have to free there."""
    migrations: tuple[tuple[str, str], ...] = ()
    """Victims whose requests migrate, each with the destination device."""


def place(
    tx: Transaction,
    model: Model,
    waited: float,
    *,
    extra: bool = False,
    burst_stages: int = 0,
    min_replicas_only: bool = False,
    only: tuple[str, str] | None = None,
    spread: bool = False,
    rule: Excludes | None = None,
) -> Placement:
    """Decide for `model`.

    Args:
        tx: The decision's transaction.
        model: The model.
        waited: Seconds that it has waited.
        extra: One more replica, which no request needs.
        burst_stages: More requests wait than the groups serve that start: one more group of so many
            stages, and nothing else. 0: not so.
        min_replicas_only: Only `replicas.min` needs it.
        only: The node and device (empty: any of the node) that it is confined to.
        spread: Not on a node that runs an instance of it.
        rule: One more check of devices.
    """
    failure_history = tx.state.failures.get(model.key)
    if min_replicas_only and failure_history and failure_history.not_before > tx.now:  # 1
        return Placement(
            "wait", f"backing off after {failure_history.failures} failures in a row: {model.error or 'unknown error'}"
        )
    if not any(is_alive(p) for p in tx.state.presence.values()):  # 2
        reason = "no node is alive; start one with `thaw up`, or python -m services.nodeagent and services.loader"
        absent = tx.now - max((p.last_message_at for p in tx.state.presence.values()), default=-math.inf)
        hopeless = min(waited, absent) > tx.policy.no_node_timeout_s
        return Placement("wait", reason, error=Unavailable(f"{model.key}: {reason}") if hopeless else None)
    devices = device_count(model.card)
    whole = start_bytes(tx.state, model.card)
    need = -(-whole // devices)
    excludes = combine_rules(placement_rule(tx.state, model, spread=spread), rule)
    forecast, starves = Forecast(tx.state, model.card, tx.now), is_starving(tx, waited)
    request = PlacementRequest(
        model,
        ask_of(tx, model, whole, waited, extra=extra),
        not extra and waited >= tx.policy.preempt_after_s,
        thaw.PROFILE if starves else tx.policy.profile,
        need,
        devices,
        failure_history.failed_devices if failure_history else (),
        forecast,
        bool(tx.state.cooldowns),
        excludes if only is None else confine_to(*only, excludes),
        _standing(tx, model.key),
        None if starves else link_rule(tx, forecast),
        burst_stages=burst_stages,
    )
    considered = _consider(tx, request)
    possible = [c for c in considered if isinstance(c, FeasiblePlacement)]
    if not possible and request.may_preempt and request.standing is not None and has_other_users(tx, request.standing):
        # Shares decide which instances leave first. The wait keeps its bound.
        request = replace(request, is_last_resort=True)
        considered = _consider(tx, request)
        possible = [c for c in considered if isinstance(c, FeasiblePlacement)]
    if possible:  # 4 to 7
        return _choose_placement(tx, request, possible, considered)
    candidates = _candidates(considered)
    if text := never_fits_reason(tx, model.card, whole + need_of(model.card).executor):  # 3
        if back := find_returning_node(tx, model.card, whole + need_of(model.card).executor):
            return Placement("wait", f"waiting for {back}, which does not report now: {text}", candidates)
        return Placement("impossible", text, candidates, error=InsufficientMemory(text))
    return Placement("wait", _obstacles(candidates, len(tx.state.bookings)), candidates)  # 8


def _standing(tx: Transaction, name: str) -> Standing | None:
    """Return the standing of a model's waiting requests; None: shares of keys do not matter yet."""
    demand = tx.state.demand.get(name)
    return standing_of(tx.state, name) if tx.state.key_shares and demand is not None and demand.waiting else None


def _consider(tx: Transaction, request: PlacementRequest) -> list[Candidate | FeasiblePlacement]:
    """Return the options, and why other places are none."""
    considered: list[Candidate | FeasiblePlacement] = []
    if request.burst_stages:
        return _add_groups(tx, request, considered)
    if not request.ask.is_extra:
        suspended = tx.state.suspended_instances(request.model)
        considered += [option for i in suspended for option in resume_options(tx, request, i)]
    considered += template_options(tx, request)
    for sets in _shortlists(tx, request):
        considered += (found := [load_option(tx, request, devices) for devices in sets])
        if any(isinstance(f, FeasiblePlacement) for f in found):
            break
        if len(considered) >= SHORTLIST_SIZE and no_device_gets_room(tx, request):
            break
    considered += group_options(tx, request)
    return _add_groups(tx, request, considered)


def _add_groups(
    tx: Transaction, request: PlacementRequest, considered: list[Candidate | FeasiblePlacement]
) -> list[Candidate | FeasiblePlacement]:
    """Add the groups that the scheduler may choose, beside the options of one worker."""
    by_stages = choose_stage_count(tx, request, considered)
    considered += by_stages.offered
    considered += by_stages.excluded
    considered += [_record_candidate(p).model_copy(update={"excluded": why}) for p, why in by_stages.refused]
    return considered


def _shortlists(tx: Transaction, r: PlacementRequest) -> Iterator[list[tuple[Booking, ...]]]:
    """Yield groups of devices, or of device sets, until one contains an option."""
    if r.devices == 1:
        for devices in shortlists(tx, r.need_bytes, r.avoid, r.forecast, r.refuses):
            yield [(b,) for b in devices]
        return
    sets = device_sets(tx, r)
    while some := list(islice(sets, SHORTLIST_SIZE)):
        yield some


def never_fits_reason(tx: Transaction, card: ModelCard, whole: int) -> str:
    """Return why a model could not run even on empty devices; empty: it could.

    Args:
        tx: The decision's transaction.
        card: The model.
        whole: Bytes on all its devices.
    """
    name, devices, are_stages = card.name, device_count(card), bool(card.stages)
    need = -(-whole // devices)
    if devices == 1:
        largest = tx.bookings().largest_budget()
        return describe_impossible(name, need, largest) if need > largest else ""
    enough = 0
    for node in tx.state.nodes.values():
        booked = [b for x in node.devices if (b := tx.state.bookings.get(device_key(node.name, x.device_id))) is not None]
        enough = max(enough, sum(1 for b in booked if b.is_reachable and b.budget_bytes >= need))
    if enough >= devices:
        return ""
    if are_stages and sum(1 for b in tx.state.bookings.values() if b.is_reachable and b.budget_bytes >= need) >= devices:
        return ""
    where = "" if are_stages else " of one node"
    return f"{name} needs {gib(need)} on each of {devices} devices{where}, and no node has more than {enough} that large"


def find_returning_node(tx: Transaction, card: ModelCard, whole: int) -> str:
    """Return a node that could run a model, and may be restarting; empty: there is none.

    Args:
        tx: The decision's transaction.
        card: The model.
        whole: Bytes on all its devices.
    """
    devices = device_count(card)
    need, wanted = -(-whole // devices), 1 if card.stages else devices
    for presence in tx.state.presence.values():
        node = tx.state.nodes.get(presence.node)
        is_recent = tx.now - presence.last_message_at <= tx.policy.no_node_timeout_s
        if node is None or is_alive(presence) or not is_recent:
            continue
        if sum(d.budget_bytes >= need for d in node.devices) >= wanted:
            return node.name
    return ""


def ask_of(tx: Transaction, model: Model, need: int, waited: float, *, extra: bool) -> Ask:
    spec, standing = model.card.spec, standing_of(tx.state, model.key)
    return Ask(
        model.key,
        need,
        waited,
        requests=max(1, tx.state.waiting_count(model.key)),
        slo_ttft_s=spec.slo.ttft,
        slo_tpot_s=spec.slo.tpot,
        start_s=least_start_s(tx.state, model) if spec.slo.ttft is not None else 0.0,
        priority=spec.priority,
        request_priority=standing.priority,
        share_s=standing.tag_s,
        is_extra=extra,
    )


def is_starving(tx: Transaction, waited: float) -> bool:
    """True if the model has waited so long that it goes before all others."""
    return waited >= max(tx.policy.starve_after_s, tx.policy.preempt_after_s)


def _choose_placement(
    tx: Transaction, r: PlacementRequest, possible: list[FeasiblePlacement], considered: list[Candidate | FeasiblePlacement]
) -> Placement:
    seed = f"{tx.state.epoch}/{tx.numbers_issued()}/{r.model.key}"
    option = r.profile.choose(r.ask, [p.option for p in possible], seed)
    if option is None:
        reason = f"the policy {r.profile.name} accepts none of the options"
        return Placement("wait", reason, _candidates(considered))
    best = next(p for p in possible if p.option is option)
    chosen = _record_candidate(best)
    candidates = _candidates([chosen if c is best else c for c in considered])
    moves = tuple(sorted(option.clearance.moves.items()))
    return Placement(
        chosen.way,
        _explain_choice(best),
        candidates,
        chosen,
        option.clearance.victims,
        resume=best.resume,
        shortfalls=best.shortfalls,
        migrations=moves,
    )


def is_alive(presence: Presence) -> bool:
    return presence.alive and presence.status is not None and not presence.status.stopping


def _candidates(considered: list[Candidate | FeasiblePlacement]) -> tuple[Candidate, ...]:
    """Return the records of the first shortlist and of the groups of stages, by name."""
    found: list[Candidate] = []
    last: FeasiblePlacement | None = None
    groups = [c for c in considered[SHORTLIST_SIZE:] if _is_group(c)]
    for c in (*considered[:SHORTLIST_SIZE], *groups):
        if isinstance(c, Candidate):
            found.append(c)
        elif c.option.clearance is NOTHING_TO_CLEAR:
            same = last is not None and last.prediction is c.prediction
            found.append(_same_except_device(c, like=found[-1]) if same else _record_candidate(c))
        else:
            found.append(_record_candidate(c))
        last = None if isinstance(c, Candidate) else c
    return tuple(sorted(found, key=_name))


def _is_group(c: Candidate | FeasiblePlacement) -> bool:
    return (c.stages if isinstance(c, Candidate) else c.option.stages) > 1


def _obstacles(candidates: tuple[Candidate, ...], devices: int) -> str:
    if not candidates:
        return "no live node has a device"
    others = f"; and {devices - len(candidates)} more devices" if devices > len(candidates) else ""
    return "no device has room: " + "; ".join(f"{c.node}/{c.device_ids[0]}: {c.excluded}" for c in candidates) + others


def describe_impossible(name: str, need: int, largest: int) -> str:
    return (
        f"{name} needs {gib(need)} and the largest device budget is {gib(largest)}: add a node with a larger budget, "
        f"or lower max_model_len, max_concurrency or engine_args.kv_cache_bytes"
    )


def _record_candidate(p: FeasiblePlacement) -> Candidate:
    option, prediction, clearance = p.option, p.prediction, p.option.clearance
    free = clearance.how == "none"
    if p.template is not None:
        way: Way = "template"
    elif p.resume is None:
        way = "load" if free else "evict_then_load"
    else:
        way = "restore" if free else "evict_then_restore"
    return create_unchecked(
        Candidate,
        {
            "node": p.node,
            "device_ids": p.device_ids,
            "way": way,
            "predicted_ms": option.cost.total_s * 1e3,
            "predicted": prediction.phases,
            "needed_bytes": p.need_bytes,
            "free_bytes": max(0, option.free_bytes),
            "victims": p.labels if clearance.victims else (),
            "excluded": None,
            "ready_by": option.way,
            "clearing": clearance.how,
            "source": option.source,
            "resident_bytes": option.resident_bytes,
            "read_bytes": prediction.read_bytes,
            "weights_bytes": prediction.weights_bytes,
            "peers": prediction.peers,
            "peer_bytes": prediction.peer_bytes,
            "stages": option.stages,
            "full_workers": option.full_workers,
            "later_devices": p.later,
            "stage_sources": p.sources,
            "spread_ms": option.cost.spread_s * 1e3,
            "queued_ms": prediction.queued_ms,
            "others_ms": clearance.penalty_s * 1e3,
            "template": p.template,
            "took_ms": None,
            "cleared_ms": None,
        },
    )


def _same_except_device(p: FeasiblePlacement, like: Candidate) -> Candidate:
    """Return a record that differs from another one only in the device."""
    there = {"node": p.node, "device_ids": p.device_ids, "free_bytes": max(0, p.option.free_bytes)}
    return create_unchecked(Candidate, {**like.__dict__, **there})


def _explain_full_workers(best: FeasiblePlacement) -> str:
    """Return why devices of a group are promised the memory of the whole model; empty: none is."""
    full, stages = best.option.full_workers, best.option.stages
    if not full:
        return ""
    which = (
        "all are full workers" if full == stages else f"{full} of them {'is a full worker' if full == 1 else 'are full workers'}"
    )
    return f"; {which}, so that a further token takes at most {best.option.tpot_s * 1e3:.0f} ms"


def _explain_choice(best: FeasiblePlacement) -> str:
    at, labels = f"{best.node}/{best.device_ids[0]}", ", ".join(best.labels)
    if best.later:
        gone = f", once these have left: {labels}" if labels else ""
        where = f"stages fetch their parts at the same time on {at}, {', '.join(best.later)}{gone}"
        if not best.is_wished:
            return f"one worker would miss the objective: {len(best.later) + 1} {where}{_explain_full_workers(best)}"
        return f"the {len(best.later) + 1} {where}: soonest"
    if best.resume is not None:
        gone = f" once these are evicted: {labels}" if labels else ""
        if best.moves:
            return f"{best.resume} is suspended, its device has no room, and it is restored onto {at}"
        return f"{best.resume} is suspended on {at} and resumes soonest{gone}"
    if best.template is not None:
        gone = f" once these are evicted: {labels}" if labels else ""
        return f"the suspended engine {best.template} on {at} has its template key and changes its model soonest{gone}"
    match best.option.clearance.how:
        case "none":
            chosen = _record_candidate(best)
            there = ", ".join(filter(None, (chosen.already_there, chosen.from_peers)))
            return f"{at} has room and is predicted to be ready soonest" + (f": {there}" if there else "")
        case "leaving":
            return f"{at} has room once the stopping instances are gone"
        case "preempt" | "migrate":
            return f"waited too long: these serving instances on {at} are drained: {labels}"
        case _:
            return f"{at} has room once these idle instances are evicted: {labels}"
