"""Where one more instance of a model goes. The rules, in this order; the code carries the same numbers:

 1. The model has failed and `replicas.min` alone asks: wait until its back-off is over.
 2. No node is alive: wait, and after `no_node_timeout` tell those who wait (`Unavailable`).
 3. No device of a live node could hold the model even if it were empty: impossible, told at once (`InsufficientMemory`).
 4. Some device has room. A suspended instance of the model is one more way, on its own devices, with what it needs to come back.
 5. Some device has room once those that are leaving already have left: it is claimed there.
 6. Some device has room once idle instances have left (victims.py): the new one claims their bytes.
 7. The model has waited longer than `preempt_after`: as 6, but instances that serve may be drained too.
 8. Otherwise it waits; the reason names what is in the way.

Whatever 4 to 7 make possible is an option; who leaves and which option is taken are the profile's choice (policies/port.py). Of many devices only
a shortlist is considered (shortlist.py). A model that has waited for `starve_after` is placed by Thaw's own profile, whatever the profile says.
An extra replica (`extra`) stops after 6, and never displaces a model that has demand. Pure: the state is only read.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from services.scheduler.domain.booking import Booking, booking
from services.scheduler.domain.constraints import Excludes, checker, confined
from services.scheduler.domain.draft import Draft
from services.scheduler.domain.entities import Instance, Model
from services.scheduler.domain.estimates import Forecast, Prediction
from services.scheduler.domain.heard import Presence
from services.scheduler.domain.needs import need_to_start
from services.scheduler.domain.policies import thaw
from services.scheduler.domain.policies.port import NOTHING_TO_CLEAR, Ask, Clearance, DeviceView, Option, Profile
from services.scheduler.domain.shortlist import SHORTLIST, shortlists
from services.scheduler.domain.suspending import left_bytes, need_bytes, share
from services.scheduler.domain.victims import Asking, cleared, view_of
from services.scheduler.domain.words import gib
from shared.contracts.node import InstanceState
from shared.contracts.plans import Candidate, ReadyBy, Way
from shared.errors import InsufficientMemory, ThawError, Unavailable

_SEVERITY = ("none", "leaving", "evict", "suspend", "migrate", "preempt")
_LEAVING = Clearance("leaving")


@dataclass(frozen=True, slots=True)
class Placement:
    """`chosen` with its victims' ids; or none, with `error` when it is hopeless and `reason` when it waits."""

    way: Way
    reason: str
    candidates: tuple[Candidate, ...] = ()
    chosen: Candidate | None = None
    victims: tuple[str, ...] = ()
    error: ThawError | None = None
    resume: str | None = None
    """The suspended instance that comes back."""
    short: int = 0
    """Bytes that the victims have to free."""


@dataclass(frozen=True, slots=True)
class _Possible:
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
        names = {r.key: f"{r.model} ({r.key})" for device in self.option.devices for r in device.residents}
        return tuple(names[v] for v in self.option.clearance.victims)


@dataclass(frozen=True, slots=True)
class _Request:
    """What is to be placed. `avoid`: devices (node/device) where it has just failed."""

    asking: Asking
    profile: Profile
    need: int
    avoid: tuple[str, ...]
    forecast: Forecast
    any_paused: bool
    excludes: Excludes | None

    @property
    def model(self) -> Model:
        return self.asking.model


def place(
    d: Draft,
    model: Model,
    waited: float,
    *,
    extra: bool = False,
    kept_up_only: bool = False,
    only: tuple[str, str] | None = None,
) -> Placement:
    """Decide for `model`, which has waited `waited` seconds. `only`: the node and device (empty: any of it) that it is confined to."""
    trouble = d.state.trouble.get(model.key)
    if kept_up_only and trouble and trouble.not_before > d.now:  # 1
        return Placement("wait", f"backing off after {trouble.failures} failures in a row: {model.error or 'unknown error'}")
    if not any(alive(p) for p in d.state.presence.values()):  # 2
        reason = "no node is alive; start one with `thaw up`, or python -m services.nodeagent and services.loader"
        hopeless = waited > d.policy.no_node_timeout
        return Placement("wait", reason, error=Unavailable(f"{model.key}: {reason}") if hopeless else None)
    need = need_to_start(d.state, model.card)
    request = _Request(
        Asking(model, ask_of(d, model, need, waited, extra=extra), not extra and waited >= d.policy.preempt_after, extra),
        thaw.PROFILE if starving(d, waited) else d.policy.profile,
        need,
        trouble.avoid if trouble else (),
        Forecast(d.state, model.card, d.now),
        bool(d.state.pauses),
        checker(d.state, model) if only is None else confined(*only, checker(d.state, model)),
    )
    considered: list[Candidate | _Possible] = [] if extra else [_consider_restore(d, request, i) for i in d.state.parked(model)]
    for devices in shortlists(d, need, request.avoid, request.forecast, request.excludes):
        considered += (found := [_consider(d, request, device) for device in devices])
        if any(isinstance(f, _Possible) for f in found):
            break
    if possible := [c for c in considered if isinstance(c, _Possible)]:  # 4 to 7
        return _chosen(d, request, possible, considered)
    candidates = _candidates(considered)
    largest = d.bookings().largest_budget()
    if need > largest:  # 3
        text = impossible(model.key, need, largest)
        return Placement("impossible", text, candidates, error=InsufficientMemory(text))
    return Placement("wait", _obstacles(candidates, len(d.state.bookings)), candidates)  # 8


def ask_of(d: Draft, model: Model, need: int, waited: float, *, extra: bool) -> Ask:
    spec = model.card.spec
    return Ask(
        model.key,
        need,
        waited,
        requests=max(1, d.state.waiting(model.key)),
        slo_ttft=spec.slo.ttft,
        slo_tpot=spec.slo.tpot,
        priority=spec.priority,
        extra=extra,
    )


def starving(d: Draft, waited: float) -> bool:
    """Whether nobody goes before it any more."""
    return waited >= max(d.policy.starve_after, d.policy.preempt_after)


def _chosen(d: Draft, r: _Request, possible: list[_Possible], considered: list[Candidate | _Possible]) -> Placement:
    seed = f"{d.state.epoch}/{d.counted()}/{r.model.key}"
    option = r.profile.choose(r.asking.ask, [p.option for p in possible], seed)
    candidates = _candidates(considered)
    if option is None:
        return Placement("wait", f"the policy {r.profile.name} takes none of the ways that there are", candidates)
    best = next(p for p in possible if p.option is option)
    chosen = _recorded(best)
    return Placement(chosen.way, _why(best), candidates, chosen, option.clearance.victims, resume=best.resume, short=best.short)


def alive(presence: Presence) -> bool:
    return presence.alive and presence.status is not None and not presence.status.stopping


def _candidates(considered: list[Candidate | _Possible]) -> tuple[Candidate, ...]:
    """Those of the first list, for the record, by name."""
    found = [_recorded(c) if isinstance(c, _Possible) else c for c in considered[:SHORTLIST]]
    return tuple(sorted(found, key=lambda c: (c.node, c.device_ids)))


def _obstacles(candidates: tuple[Candidate, ...], devices: int) -> str:
    if not candidates:
        return "no live node has a device"
    others = f"; and {devices - len(candidates)} more devices" if devices > len(candidates) else ""
    return "no device has room: " + "; ".join(f"{c.node}/{c.device_ids[0]}: {c.excluded}" for c in candidates) + others


def impossible(name: str, need: int, largest: int) -> str:
    return (
        f"{name} needs {gib(need)} and the largest device budget is {gib(largest)}: add a node with a larger budget, "
        f"or lower max_model_len, max_concurrency or engine_args.kv_cache_bytes"
    )


def _consider(d: Draft, r: _Request, b: Booking) -> Candidate | _Possible:
    """One device: an option, or a candidate that says why not."""
    if b.closed:
        return _excluded(b, r.need, b.closed)
    if r.excludes is not None and (why := r.excludes(b)):
        return _excluded(b, r.need, why)
    if r.need > b.budget:
        return _excluded(b, r.need, f"needs {gib(r.need)}, its budget is {gib(b.budget)}", "impossible")
    fit = _fit(d, r, b, r.need)
    if isinstance(fit, str):
        return _excluded(b, r.need, fit)
    view, clearance, short = fit
    prediction = r.forecast.at(b, leaving=clearance is not NOTHING_TO_CLEAR)
    option = Option((view,), "load", prediction.cost, clearance, prediction.there, prediction.source)
    return _Possible(option, b.node, (b.device_id,), r.need, prediction, short)


def _consider_restore(d: Draft, r: _Request, i: Instance) -> Candidate | _Possible:
    """The devices of a suspended instance, all of them, for what it lacks to come back: it comes back when the last of them has room."""
    whole = share(i, need_bytes(d.state, i))
    need = max(0, whole - left_bytes(d.state, i))
    fits: list[tuple[DeviceView, Clearance, int]] = []
    for device_id in i.device_ids:
        b = booking(d.state, i.node, device_id)
        # A node that is cordoned takes nothing new; what is on it may come back.
        if not b.reachable:
            return _excluded(b, need, b.closed)
        if r.excludes is not None and (why := r.excludes(b)):
            return _excluded(b, need, why)
        if whole > b.budget:
            return _excluded(b, need, f"needs {gib(whole)}, its budget is {gib(b.budget)}", "impossible")
        fit = _fit(d, r, b, need)
        if isinstance(fit, str):
            return _excluded(b, need, fit)
        fits.append(fit)
    clearance = together([c for _, c, _ in fits])
    prediction = r.forecast.restore(i, leaving=clearance is not NOTHING_TO_CLEAR)
    way: ReadyBy = "wake" if i.state is InstanceState.ASLEEP else "restore"
    option = Option(tuple(view for view, *_ in fits), way, prediction.cost, clearance)
    return _Possible(option, i.node, i.device_ids, need, prediction, max(short for *_, short in fits), i.instance_id)


def together(clearances: Iterable[Clearance]) -> Clearance:
    """What has to be cleared on several devices, each victim once: as severe as the severest, and as long as the longest takes."""
    found = list(clearances)
    if len(found) == 1:
        return found[0]
    worst = max(found, key=lambda c: _SEVERITY.index(c.how))
    return replace(
        worst,
        victims=tuple(dict.fromkeys(v for c in found for v in c.victims)),
        freed=sum(c.freed for c in found),
        delay_s=max(c.delay_s for c in found),
        penalty=sum(c.penalty for c in found),
        moves={v: to for c in found for v, to in c.moves.items()},
    )


def _fit(d: Draft, r: _Request, b: Booking, need: int) -> tuple[DeviceView, Clearance, int] | str:
    """How one device gets room for `need` bytes, and how many of them have to come free; or why it does not."""
    if r.any_paused and d.paused(b.key):
        return "its nodeagent has just refused a reservation"
    failed = b.key in r.avoid
    if need <= b.free:  # 4
        return view_of(b, failed=failed), NOTHING_TO_CLEAR, 0
    if need <= b.coming:  # 5
        return view_of(b, failed=failed), _LEAVING, 0
    short = need - b.coming
    view, clearance = cleared(d, r.asking, b, short, r.profile.clear, failed=failed)
    if isinstance(clearance, str):
        return f"needs {gib(need)}, {gib(max(0, b.free))} free of {gib(b.budget)}; {clearance}"
    return view, clearance, short  # 6, 7


def _excluded(b: Booking, need: int, why: str, way: Way = "wait") -> Candidate:
    return Candidate(node=b.node, device_ids=(b.device_id,), way=way, needed_bytes=need, free_bytes=max(0, b.free), excluded=why)


def _recorded(p: _Possible) -> Candidate:
    free = p.option.clearance.how == "none"
    if p.resume is None:
        way: Way = "load" if free else "evict_then_load"
    else:
        way = "restore" if free else "evict_then_restore"
    return Candidate(
        node=p.node,
        device_ids=p.device_ids,
        way=way,
        predicted_ms=p.prediction.ms,
        predicted=p.prediction.phases,
        needed_bytes=p.need,
        free_bytes=max(0, p.option.free),
        victims=p.labels,
        ready_by=p.option.way,
        clearing=p.option.clearance.how,
        source=p.option.source,
        resident_bytes=p.option.resident_bytes,
        stages=p.option.stages,
        full_workers=p.option.full_workers,
        spread_ms=p.option.cost.spread * 1e3,
        queued_ms=p.prediction.queued_ms,
        others_ms=p.option.clearance.penalty * 1e3,
    )


def _why(best: _Possible) -> str:
    at, labels = f"{best.node}/{best.device_ids[0]}", ", ".join(best.labels)
    if best.resume is not None:
        gone = f" once these have left: {labels}" if labels else ""
        return f"{best.resume} is suspended on {at} and comes back soonest{gone}"
    match best.option.clearance.how:
        case "none":
            return f"{at} has room and is predicted to be ready soonest"
        case "leaving":
            return f"{at} has room once those already leaving have left"
        case "preempt" | "migrate":
            return f"waited too long: on {at} these are drained though they serve: {labels}"
        case _:
            return f"{at} has room once these idle instances have left: {labels}"
