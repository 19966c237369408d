"""The ways that there are for a model to become ready, as options for a policy: for each device (or set of devices of one node), from what its bytes
come and who has to leave first. An option is made only if the mesh can carry it out.

A device set is granted all or nothing: every device of it has room, or is cleared.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from services.scheduler.domain.cost.cost import Cost, Way
from services.scheduler.domain.estimates.start_times import Forecast, Prediction
from services.scheduler.domain.formatting import gib
from services.scheduler.domain.placement.constraints import Excludes
from services.scheduler.domain.placement.victims import Asking, cleared, view_of
from services.scheduler.domain.policies.port import NOTHING_TO_CLEAR, Clearance, DeviceView, Option, Profile
from services.scheduler.domain.state.accounting import booking
from services.scheduler.domain.state.booking import Booking, device_key
from services.scheduler.domain.state.device_memory import left_bytes, need_bytes, share
from services.scheduler.domain.state.entities import Instance
from services.scheduler.domain.state.transaction import Draft
from services.scheduler.domain.values import replace, value
from shared.contracts.node import InstanceState
from shared.contracts.plans import Candidate
from shared.contracts.plans import Way as PlanWay

_SEVERITY = ("none", "leaving", "evict", "suspend", "migrate", "preempt")
_LEAVING = Clearance("leaving")


@value(frozen=True, slots=True)
class Request:
    """What is to be placed. `need`: bytes of each of its `devices`; `avoid`: devices (node/device) where it has just failed."""

    asking: Asking
    profile: Profile
    need: int
    devices: int
    avoid: tuple[str, ...]
    forecast: Forecast
    any_paused: bool
    excludes: Excludes | None


class Possible(NamedTuple):
    """An option, and what carrying it out and its record need. `short`: bytes that its victims have to free."""

    option: Option
    node: str
    device_ids: tuple[str, ...]
    need: int
    prediction: Prediction
    short: int = 0
    resume: str | None = None

    @property
    def labels(self) -> tuple[str, ...]:
        victims = self.option.clearance.victims
        if not victims:
            return ()
        names = {r.key: f"{r.model} ({r.key})" for device in self.option.devices for r in device.residents}
        return tuple(names[v] for v in victims)


class Fit(NamedTuple):
    """How one device gets room: who leaves, and how many bytes have to come free."""

    device: DeviceView
    clearance: Clearance
    short: int


def of_devices(d: Draft, r: Request, devices: tuple[Booking, ...]) -> Candidate | Possible:
    """Loading the model onto a device, or onto several of one node together."""
    if len(devices) == 1:
        return _of_one(d, r, devices[0])
    fits: list[Fit] = []
    for b in devices:
        fit = _open_for(d, r, b)
        if isinstance(fit, Candidate):
            return fit
        fits.append(fit)
    clearance = together([f.clearance for f in fits])
    if clearance.moves and _in_each_others_way(clearance, devices):
        return excluded(
            devices[0], r.need, f"needs {gib(r.need)} of each device, and those that serve there have nowhere else to go on"
        )
    prediction = r.forecast.at(devices[0], leaving=clearance is not NOTHING_TO_CLEAR)
    option = _load(d, tuple([f.device for f in fits]), prediction, clearance)
    ids = tuple([b.device_id for b in devices])
    return Possible(option, devices[0].node, ids, r.need, prediction, max([f.short for f in fits]))


def _of_one(d: Draft, r: Request, b: Booking) -> Candidate | Possible:
    if r.need <= b.free and not (b.closed or r.any_paused) and r.excludes is None:  # the usual case, in short
        prediction = r.forecast.at(b, leaving=False)
        view = DeviceView(b.key, b.node, b.budget, b.free, b.coming, failed=b.key in r.avoid)
        return Possible(_load(d, (view,), prediction, NOTHING_TO_CLEAR), b.node, (b.device_id,), r.need, prediction)
    fit = _open_for(d, r, b)
    if isinstance(fit, Candidate):
        return fit
    prediction = r.forecast.at(b, leaving=fit.clearance is not NOTHING_TO_CLEAR)
    option = _load(d, (fit.device,), prediction, fit.clearance)
    return Possible(option, b.node, (b.device_id,), r.need, prediction, fit.short)


def _open_for(d: Draft, r: Request, b: Booking) -> Candidate | Fit:
    """How one device gets room for its share of the model; or what is in the way."""
    if b.closed:
        return excluded(b, r.need, b.closed)
    if r.excludes is not None and (why := r.excludes(b)):
        return excluded(b, r.need, why)
    if r.need > b.budget:
        return excluded(b, r.need, f"needs {gib(r.need)}, its budget is {gib(b.budget)}", "impossible")
    fit = _fit(d, r, b, r.need)
    return excluded(b, r.need, fit) if isinstance(fit, str) else fit


def _load(d: Draft, devices: tuple[DeviceView, ...], prediction: Prediction, clearance: Clearance) -> Option:
    reuses = prediction.there and prediction.source != "dram" and "reuse" in d.policy.capabilities
    way: Way = "reuse" if reuses else "load"
    return Option(devices, way, _cost(prediction, clearance), clearance, prediction.there, prediction.source)


def _in_each_others_way(clearance: Clearance, devices: tuple[Booking, ...]) -> bool:
    """Whether victims of several devices would move to one that is to be cleared itself, or to the same one."""
    to = list(clearance.moves.values())
    return len(devices) > 1 and (len(set(to)) < len(to) or not {b.key for b in devices}.isdisjoint(to))


def of_suspended(d: Draft, r: Request, i: Instance) -> Candidate | Possible:
    """The devices of a suspended instance, all of them, for what it lacks to come back: it comes back when the last of them has room."""
    whole = share(i, need_bytes(d.state, i))
    need = max(0, whole - left_bytes(d.state, i))
    fits: list[Fit] = []
    for device_id in i.device_ids:
        b = booking(d.state, i.node, device_id)
        # A node that is cordoned takes nothing new; what is on it may come back.
        if not b.reachable:
            return excluded(b, need, b.closed)
        if r.excludes is not None and (why := r.excludes(b)):
            return excluded(b, need, why)
        if whole > b.budget:
            return excluded(b, need, f"needs {gib(whole)}, its budget is {gib(b.budget)}", "impossible")
        fit = _fit(d, r, b, need)
        if isinstance(fit, str):
            return excluded(b, need, fit)
        fits.append(fit)
    clearance = together([f.clearance for f in fits])
    prediction = r.forecast.restore(i, leaving=clearance is not NOTHING_TO_CLEAR)
    way: Way = "wake" if i.state is InstanceState.ASLEEP else "restore"
    option = Option(tuple([f.device for f in fits]), way, _cost(prediction, clearance), clearance, source="snapshot")
    return Possible(option, i.node, i.device_ids, need, prediction, max([f.short for f in fits]), i.instance_id)


def _fit(d: Draft, r: Request, b: Booking, need: int) -> Fit | str:
    """How one device gets room for `need` bytes; or why it does not."""
    if r.any_paused and d.paused(b.key):
        return "its nodeagent has just refused a reservation"
    failed = b.key in r.avoid
    if need <= b.free:
        return Fit(view_of(b, failed=failed), NOTHING_TO_CLEAR, 0)
    if need <= b.coming:
        return Fit(view_of(b, failed=failed), _LEAVING, 0)
    short = need - b.coming
    view, clearance = cleared(d, r.asking, b, short, r.profile.clear, failed=failed)
    if isinstance(clearance, str):
        return f"needs {gib(need)}, {gib(max(0, b.free))} free of {gib(b.budget)}; {clearance}"
    return Fit(view, clearance, short)


def _cost(prediction: Prediction, clearance: Clearance) -> Cost:
    """With the time that clearing takes where that is known."""
    if not clearance.delay_s:
        return prediction.cost
    cost = prediction.cost
    phases: Mapping[str, float] = {**cost.phases, "reserve": cost.phases.get("reserve", 0.0) + clearance.delay_s}
    return Cost(cost.total + clearance.delay_s, phases, cost.spread)


def together(clearances: Iterable[Clearance]) -> Clearance:
    """What has to be cleared on several devices, each victim once: as severe as the severest, and as long as the longest takes."""
    found = list(clearances)
    if len(found) == 1:
        return found[0]
    worst = max(found, key=lambda c: _SEVERITY.index(c.how))
    if not any(c.victims for c in found):
        return worst
    return replace(
        worst,
        victims=tuple(dict.fromkeys(v for c in found for v in c.victims)),
        freed=sum(c.freed for c in found),
        delay_s=max(c.delay_s for c in found),
        penalty=sum(c.penalty for c in found),
        moves={v: to for c in found for v, to in c.moves.items()},
    )


def excluded(b: Booking, need: int, why: str, way: PlanWay = "wait") -> Candidate:
    return Candidate(node=b.node, device_ids=(b.device_id,), way=way, needed_bytes=need, free_bytes=max(0, b.free), excluded=why)


def device_sets(d: Draft, r: Request) -> Iterator[tuple[Booking, ...]]:
    """For a model over several devices: of each node the devices that take it soonest, the best nodes first. Every node is looked at:
    such models are few."""
    ranked = []
    for node in d.state.nodes.values():
        keys = [device_key(node.name, device.device_id) for device in node.devices]
        there = [b for key in keys if (b := d.state.bookings.get(key)) is not None]
        usable = sorted(there, key=lambda b: (*_rank(d, r, b), b.free, b.key))[: r.devices]
        if len(usable) < r.devices:
            continue
        # Devices of one kind, in the order that the engine counts them in.
        chosen = tuple(sorted(usable, key=lambda b: (len(b.device_id), b.device_id)))
        worst = max(_rank(d, r, b) for b in usable)
        ranked.append((worst, r.forecast.at(chosen[0], leaving=False).ms, node.name, chosen))
    ranked.sort(key=lambda found: found[:3])
    return (chosen for *_, chosen in ranked)


def _rank(d: Draft, r: Request, b: Booking) -> tuple[int, bool]:
    """How far a device is from having room; whether the model has just failed there."""
    steps = (b.free, b.coming, b.coming + b.idle, b.coming + b.movable, b.budget)
    open_ = not b.closed and not d.paused(b.key) and not (r.excludes is not None and r.excludes(b))
    return (next((n for n, room in enumerate(steps) if r.need <= room), len(steps)) if open_ else len(steps) + 1, b.key in r.avoid)
