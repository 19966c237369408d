"""The options for making a model ready: for each device or device set, its source and victims.

Only options that the mesh can carry out are built. A device set is granted all or nothing: every
device of it has room, or is cleared.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from services.scheduler.domain.cost.cost import Cost, Way
from services.scheduler.domain.estimates.start_times import Forecast, Prediction
from services.scheduler.domain.formatting import gib
from services.scheduler.domain.placement.request import PlacementRequest
from services.scheduler.domain.placement.victims import clear_device, device_view
from services.scheduler.domain.policies.port import NOTHING_TO_CLEAR, Clearance, DeviceView, Option
from services.scheduler.domain.state.accounting import booking_of
from services.scheduler.domain.state.booking import Booking, device_key
from services.scheduler.domain.state.device_memory import per_device_bytes, resume_need_bytes, suspended_bytes
from services.scheduler.domain.state.entities import Instance
from services.scheduler.domain.state.shared_weights import lacking_bytes, needed_bytes, rounding_bytes, start_needs
from services.scheduler.domain.state.transaction import Transaction
from services.scheduler.domain.values import replace
from shared.contracts.node import InstanceState
from shared.contracts.plans import Candidate
from shared.contracts.plans import Way as PlanWay
from shared.sizing import need_of
from shared.template_key import template_key

_SEVERITY = ("none", "leaving", "evict", "suspend", "migrate", "preempt")
_LEAVING = Clearance("leaving")
_MOST_TEMPLATES = 8
"""Templates that are considered for one model, the most promising ones."""
_MOST_RANKED_TEMPLATES = 256
"""Templates whose devices are looked at for one model: a bound on the decision's time."""


Shortfalls = tuple[tuple[str, int], ...]
"""Devices (node/device), each with the bytes that are to become free there."""


class FeasiblePlacement(NamedTuple):
    """An option with what its execution and its record need.

    Attributes:
        shortfalls: The devices that its victims clear, each with the bytes that they have to free
            there.
        moves: The suspended instance `resume` is restored onto another device than it had.
    """

    option: Option
    node: str
    device_ids: tuple[str, ...]
    need_bytes: int
    prediction: Prediction
    shortfalls: Shortfalls = ()
    resume: str | None = None
    moves: bool = False
    template: str | None = None
    later: tuple[str, ...] = ()
    """The device (node/device) of each later stage of a group on several nodes."""
    sources: tuple[str, ...] = ()
    """The source of the bytes of each stage of such a group."""
    is_wished: bool = True
    """The number of stages is the model's own setting."""

    @property
    def labels(self) -> tuple[str, ...]:
        victims = self.option.clearance.victims
        if not victims:
            return ()
        names = {r.key: f"{r.model} ({r.key})" for device in self.option.devices for r in device.residents}
        return tuple(names[v] for v in victims)


class DeviceFit(NamedTuple):
    """The victims on one device, and the bytes that they have to free."""

    device: DeviceView
    clearance: Clearance
    short_bytes: int


def load_option(tx: Transaction, r: PlacementRequest, devices: tuple[Booking, ...]) -> Candidate | FeasiblePlacement:
    """Return the option of loading the model onto a device, or onto several of one node."""
    if len(devices) == 1:
        return _of_one(tx, r, devices[0])
    fits: list[DeviceFit] = []
    for b in devices:
        fit = open_for(tx, r, b)
        if isinstance(fit, Candidate):
            return fit
        fits.append(fit)
    clearance = combine([f.clearance for f in fits])
    if clearance.moves and targets_conflict(clearance, devices):
        return excluded_candidate(
            devices[0],
            r.need_bytes,
            f"needs {gib(r.need_bytes)} on each device, and the serving instances there have no migration target",
        )
    prediction = r.forecast.predict_set(devices, leaving=clearance is not NOTHING_TO_CLEAR)
    option = _load(tx, tuple([f.device for f in fits]), prediction, clearance)
    ids = tuple([b.device_id for b in devices])
    return FeasiblePlacement(option, devices[0].node, ids, r.need_bytes, prediction, list_shortfalls(fits))


def _of_one(tx: Transaction, r: PlacementRequest, b: Booking) -> Candidate | FeasiblePlacement:
    if (
        (need := start_needs(b, r.model.card, r.need_bytes)) <= b.free_bytes
        and not (b.closed_reason or r.has_cooldowns or b.is_separate)
        and r.excludes is None
        and r.link is None
    ):  # the usual case, without the general path
        prediction = r.forecast.predict(b, leaving=False)
        view = DeviceView(b.key, b.node, b.budget_bytes, b.free_bytes, b.free_soon_bytes, has_failed=b.key in r.avoid)
        return FeasiblePlacement(_load(tx, (view,), prediction, NOTHING_TO_CLEAR), b.node, (b.device_id,), need, prediction)
    fit = open_for(tx, r, b)
    if isinstance(fit, Candidate):
        return fit
    prediction = r.forecast.predict(b, leaving=fit.clearance is not NOTHING_TO_CLEAR)
    option = _load(tx, (fit.device,), prediction, fit.clearance)
    need = needed_bytes(tx.state, b, r.model.card, r.need_bytes)
    return FeasiblePlacement(option, b.node, (b.device_id,), need, prediction, list_shortfalls((fit,)))


def open_for(tx: Transaction, r: PlacementRequest, b: Booking) -> Candidate | DeviceFit:
    """Return how one device gets room for its share of the model, or why it does not."""
    if b.closed_reason:
        return excluded_candidate(b, r.need_bytes, b.closed_reason)
    if (refuses := r.refuses) is not None and (why := refuses(b)):
        return excluded_candidate(b, r.need_bytes, why)
    need = start_needs(b, r.model.card, r.need_bytes)
    alone = need + (rounding_bytes(r.model.card) if b.is_separate else 0)
    if alone > b.budget_bytes:
        return excluded_candidate(b, alone, f"needs {gib(alone)}, its budget is {gib(b.budget_bytes)}", "impossible")
    fit = _fit_sharing(tx, r, b) if b.is_separate else _fit(tx, r, b, need)
    return excluded_candidate(b, r.need_bytes, fit) if isinstance(fit, str) else fit


def _load(tx: Transaction, devices: tuple[DeviceView, ...], prediction: Prediction, clearance: Clearance) -> Option:
    way: Way = "load"
    if prediction.peer_bytes > prediction.resident_bytes and "peer_copy" in tx.policy.capabilities:
        way = "peer_copy"
    elif prediction.is_reuse and "reuse" in tx.policy.capabilities:
        way = "reuse"
    return Option(devices, way, cost_with_clearing(prediction, clearance), clearance, prediction.resident_bytes, prediction.source)


def targets_conflict(clearance: Clearance, devices: Sequence[Booking]) -> bool:
    """True if a victim would migrate to a device to be cleared, or two to the same device."""
    to = list(clearance.moves.values())
    return len(devices) > 1 and (len(set(to)) < len(to) or not {b.key for b in devices}.isdisjoint(to))


def resume_option(tx: Transaction, r: PlacementRequest, i: Instance) -> Candidate | FeasiblePlacement:
    """Return the option of resuming a suspended instance on its own devices.

    It resumes when the last of them has room.
    """
    whole = per_device_bytes(i, resume_need_bytes(tx.state, i))
    need = max(0, whole - suspended_bytes(tx.state, i))
    fits: list[DeviceFit] = []
    for device_id in i.device_ids:
        b = booking_of(tx.state, i.node, device_id)
        # A cordoned node accepts no new instances; those on it may resume.
        if not b.is_reachable:
            return excluded_candidate(b, need, b.closed_reason)
        if r.excludes is not None and (why := r.excludes(b)):
            return excluded_candidate(b, need, why)
        if whole > b.budget_bytes:
            return excluded_candidate(b, need, f"needs {gib(whole)}, its budget is {gib(b.budget_bytes)}", "impossible")
        fit = _fit(tx, r, b, need)
        if isinstance(fit, str):
            return excluded_candidate(b, need, fit)
        fits.append(fit)
    clearance = combine([f.clearance for f in fits])
    prediction = r.forecast.predict_resume(i, leaving=clearance is not NOTHING_TO_CLEAR)
    way: Way = "wake" if i.state is InstanceState.ASLEEP else "restore"
    option = Option(tuple([f.device for f in fits]), way, cost_with_clearing(prediction, clearance), clearance, source="snapshot")
    return FeasiblePlacement(option, i.node, i.device_ids, need, prediction, list_shortfalls(fits), i.instance_id)


def move_options(tx: Transaction, r: PlacementRequest, i: Instance) -> list[FeasiblePlacement]:
    """Return the options of resuming a suspended instance on other devices of its node.

    They are of the same kind, and free now: clearing one for a move has no advantage over clearing
    the instance's own.
    """
    report = tx.state.reports.get(i.instance_id)
    need = resume_need_bytes(tx.state, i)
    found = []
    for device_id in report.status.suspension.moves_to if report is not None else ():
        b = tx.state.bookings.get(device_key(i.node, device_id))
        if b is None or not b.is_reachable or need > b.free_bytes or (r.excludes is not None and r.excludes(b)):
            continue
        if r.has_cooldowns and tx.is_cooling_down(b.key):
            continue
        prediction = r.forecast.predict_resume(i, leaving=False)
        view = device_view(tx, b, failed=b.key in r.avoid)
        option = Option((view,), "restore", cost_with_clearing(prediction, NOTHING_TO_CLEAR), NOTHING_TO_CLEAR, source="snapshot")
        found.append(FeasiblePlacement(option, i.node, (device_id,), need, prediction, (), i.instance_id, moves=True))
    return found


def resume_options(tx: Transaction, r: PlacementRequest, i: Instance) -> list[Candidate | FeasiblePlacement]:
    """Return the options of resuming a suspended instance.

    1. Its own devices have room: there. 2. Else also on another device that has it.
    """
    own = resume_option(tx, r, i)
    if isinstance(own, FeasiblePlacement) and own.option.clearance is NOTHING_TO_CLEAR:  # 1
        return [own]
    return [own, *move_options(tx, r, i)]  # 2


def template_options(tx: Transaction, r: PlacementRequest) -> Iterator[Candidate | FeasiblePlacement]:
    """Yield the options of taking the engine of a suspended instance of the same template key.

    Of many these are considered: first those whose devices have room, then those that are ready
    soonest.
    """
    if not tx.state.by_template or "template" not in tx.policy.capabilities & r.profile.uses:
        return
    key = template_key(r.model.card)
    if key not in tx.state.by_template:
        return
    kv_bytes = need_of(r.model.card).kv
    found = tx.memoize(("templates", key, kv_bytes), lambda: _list_templates(tx, r.forecast, key, kv_bytes))
    if len(found) > _MOST_TEMPLATES:
        found = heapq.nsmallest(_MOST_TEMPLATES, found[:_MOST_RANKED_TEMPLATES], key=lambda i: _rank_template(tx, r, i))
    for i in found:
        yield _template_option(tx, r, i)


def _list_templates(tx: Transaction, forecast: Forecast, key: str, kv_bytes: int) -> list[Instance]:
    """Return the instances whose engines can be taken; of many the soonest ready are first."""
    there = [i for instance_id in tx.state.by_template[key] if (i := tx.state.instances.get(instance_id)) is not None]
    found = [i for i in there if i.state.parked and i.leaving == "no" and i.kv_bytes == kv_bytes]
    if len(found) > _MOST_TEMPLATES:
        found.sort(key=lambda i: forecast.predict_template(i, leaving=False).ms)
    return found


def _rank_template(tx: Transaction, r: PlacementRequest, i: Instance) -> tuple[int, bool]:
    """Return how much has to leave a template's devices, and whether the model failed there."""
    return max([_rank(tx, r, booking_of(tx.state, i.node, device_id)) for device_id in i.device_ids])


def _template_option(tx: Transaction, r: PlacementRequest, i: Instance) -> Candidate | FeasiblePlacement:
    """Return the option of taking the engine of the suspended instance `i`.

    Its own bytes are not counted on: the node replaces its booking when it receives the start.
    """
    fits: list[DeviceFit] = []
    for device_id in i.device_ids:
        fit = open_for(tx, r, booking_of(tx.state, i.node, device_id))
        if isinstance(fit, Candidate):
            return fit
        if i.instance_id in fit.clearance.victims:
            b = booking_of(tx.state, i.node, device_id)
            return excluded_candidate(b, r.need_bytes, f"its template {i.instance_id} would have to leave")
        fits.append(fit)
    clearance = combine([f.clearance for f in fits])
    prediction = r.forecast.predict_template(i, leaving=clearance is not NOTHING_TO_CLEAR)
    option = Option(
        tuple([f.device for f in fits]), "template", cost_with_clearing(prediction, clearance), clearance, source="template"
    )
    return FeasiblePlacement(option, i.node, i.device_ids, r.need_bytes, prediction, list_shortfalls(fits), template=i.instance_id)


def _fit(tx: Transaction, r: PlacementRequest, b: Booking, need: int) -> DeviceFit | str:
    """Return how one device gets room for `need` bytes, or why it does not."""
    if r.has_cooldowns and tx.is_cooling_down(b.key):
        return "its nodeagent has just refused a reservation"
    failed = b.key in r.avoid
    if need <= b.free_bytes:
        return DeviceFit(device_view(tx, b, failed=failed), NOTHING_TO_CLEAR, 0)
    if need <= b.free_soon_bytes:
        return DeviceFit(device_view(tx, b, failed=failed), _LEAVING, 0)
    short = need - b.free_soon_bytes
    view, clearance = clear_device(tx, r, b, short, failed=failed)
    if isinstance(clearance, str):
        return f"needs {gib(need)}, {gib(max(0, b.free_bytes))} free of {gib(b.budget_bytes)}; {clearance}{_describe_stuck(tx, b)}"
    return DeviceFit(view, clearance, short)


def _describe_stuck(tx: Transaction, b: Booking) -> str:
    """Name the instances of a device that should have left or ended long ago."""
    stuck = [i.instance_id for i in tx.state.holders_on(b.node, b.device_id) if tx.is_stuck(i.instance_id)]
    presence = tx.state.presence.get(b.node)
    if presence is not None and presence.stuck and presence.status is not None:
        failed = (s for s in presence.status.instances if s.instance_id in presence.stuck)
        stuck += [s.instance_id for s in failed if b.device_id in s.device_ids]
    return f"; should have ended, but still holds memory: {', '.join(stuck)}" if stuck else ""


def _fit_sharing(tx: Transaction, r: PlacementRequest, b: Booking) -> DeviceFit | str:
    """Return the fit on a separate device, where the need depends on the instances that stay.

    Victims that share units free less together than they hold. The policy is asked for more until
    what its victims leave suffices.
    """
    if r.has_cooldowns and tx.is_cooling_down(b.key):
        return "its nodeagent has just refused a reservation"
    failed, card = b.key in r.avoid, r.model.card

    def sum_lacking(gone: Iterable[str]) -> int:
        return lacking_bytes(tx.state, b, card, r.need_bytes, frozenset(gone))

    if sum_lacking(()) == 0:
        return DeviceFit(device_view(tx, b, failed=failed), NOTHING_TO_CLEAR, 0)
    there = [i for i in tx.state.holders_on(b.node, b.device_id) if i.leaving != "no"]
    leaving = [i.instance_id for i in there if not tx.is_stuck(i.instance_id)]
    short = sum_lacking(leaving)
    if short == 0:
        return DeviceFit(device_view(tx, b, failed=failed), _LEAVING, 0)
    while True:
        view, clearance = clear_device(tx, r, b, short, failed=failed)
        if isinstance(clearance, str):
            need = needed_bytes(tx.state, b, card, r.need_bytes)
            return (
                f"needs {gib(need)}, {gib(max(0, b.free_bytes))} free of {gib(b.budget_bytes)}; {clearance}{_describe_stuck(tx, b)}"
            )
        more = sum_lacking([*leaving, *clearance.victims])
        if more == 0:
            return DeviceFit(view, clearance, short)
        short = max(short + more, clearance.freed_bytes + 1)


def cost_with_clearing(prediction: Prediction, clearance: Clearance) -> Cost:
    """Return the cost including the time of clearing where that is known."""
    if not clearance.delay_s:
        return prediction.cost
    cost = prediction.cost
    phases: Mapping[str, float] = {**cost.phases, "reserve": cost.phases.get("reserve", 0.0) + clearance.delay_s}
    return Cost(cost.total_s + clearance.delay_s, phases, cost.spread_s)


def combine(clearances: Iterable[Clearance]) -> Clearance:
    """Combine the clearances of several devices: each victim once, the longest delay."""
    found = list(clearances)
    if len(found) == 1:
        return found[0]
    worst = max(found, key=lambda c: _SEVERITY.index(c.how))
    if not any(c.victims for c in found):
        return worst
    return replace(
        worst,
        victims=tuple(dict.fromkeys(v for c in found for v in c.victims)),
        freed_bytes=sum(c.freed_bytes for c in found),
        delay_s=max(c.delay_s for c in found),
        penalty_s=sum(c.penalty_s for c in found),
        moves={v: to for c in found for v, to in c.moves.items()},
    )


def list_shortfalls(fits: Iterable[DeviceFit]) -> Shortfalls:
    """Return the devices to be cleared, each with the bytes that its victims have to free."""
    return tuple([(f.device.key, f.short_bytes) for f in fits if f.short_bytes])


def excluded_candidate(b: Booking, need: int, why: str, way: PlanWay = "wait") -> Candidate:
    return Candidate(
        node=b.node, device_ids=(b.device_id,), way=way, needed_bytes=need, free_bytes=max(0, b.free_bytes), excluded=why
    )


def device_sets(tx: Transaction, r: PlacementRequest) -> Iterator[tuple[Booking, ...]]:
    """Yield device sets for a model over several devices, the soonest node first.

    All nodes are examined, since such models are few.
    """
    ranked = []
    for node in tx.state.nodes.values():
        keys = [device_key(node.name, device.device_id) for device in node.devices]
        there = [b for key in keys if (b := tx.state.bookings.get(key)) is not None]
        usable = sorted(there, key=lambda b: (*_rank(tx, r, b), b.free_bytes, b.key))[: r.devices]
        if len(usable) < r.devices:
            continue
        # Devices of one kind, in the order in which the engine counts them.
        chosen = tuple(sorted(usable, key=lambda b: (len(b.device_id), b.device_id)))
        worst = max(_rank(tx, r, b) for b in usable)
        ranked.append((worst, r.forecast.predict_set(chosen, leaving=False).ms, node.name, chosen))
    ranked.sort(key=lambda found: found[:3])
    return (chosen for *_, chosen in ranked)


def _rank(tx: Transaction, r: PlacementRequest, b: Booking) -> tuple[int, bool]:
    """Return how much has to leave before a device has room, and whether the model failed there."""
    steps = (
        b.free_bytes,
        b.free_soon_bytes,
        b.free_soon_bytes + b.idle_bytes,
        b.free_soon_bytes + b.evictable_bytes,
        b.budget_bytes,
    )
    refuses = r.refuses
    open_ = not b.closed_reason and not tx.is_cooling_down(b.key) and not (refuses is not None and refuses(b))
    return (
        next((n for n, room in enumerate(steps) if r.need_bytes <= room), len(steps)) if open_ else len(steps) + 1,
        b.key in r.avoid,
    )
