"""Where one more instance of a model goes. The branches, in this order; the code carries the same numbers:

 1. The model has failed and `replicas.min` alone asks: wait until its back-off is over.
 2. No node is alive: wait, and after `no_node_timeout` tell those who wait (`Unavailable`).
 3. No device of a live node could hold the model even if it were empty: impossible, told at once (`InsufficientMemory`).
 4. Some device has room: take the one predicted to be ready soonest. A suspended instance of the model is one more candidate, on its own
    device with what it needs to come back; its victims leave as in 5 to 7, and of what is to be had the soonest is taken.
 5. Some device has room once those that are leaving already have left: claim it there.
 6. Some device has room once idle instances have left: the longest idle leave (victims.py), the new one claims their bytes.
 7. The model has waited longer than `preempt_after`: as 6, but instances that serve may be drained too.
 8. Otherwise it waits; the reason names what is in the way.

Among devices of one branch: not where it has just failed, then soonest ready, then fewest bytes evicted, then where one is idle the
longest, then tightest fit.
Of many devices only a shortlist is considered (shortlist.py).
An extra replica (`extra`) stops after 6, and never displaces a model that has demand. Pure: the state is only read.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from services.scheduler.domain.booking import Booking, booking
from services.scheduler.domain.draft import Draft
from services.scheduler.domain.entities import Instance, Model
from services.scheduler.domain.estimates import Forecast
from services.scheduler.domain.heard import Presence
from services.scheduler.domain.needs import need_to_start
from services.scheduler.domain.shortlist import SHORTLIST, shortlists
from services.scheduler.domain.suspending import left_bytes, need_bytes, share
from services.scheduler.domain.victims import Victims, choose_victims
from services.scheduler.domain.words import gib
from shared.contracts.plans import Candidate, Way
from shared.errors import InsufficientMemory, ThawError, Unavailable


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
class _Option:
    candidate: Candidate
    branch: int
    victims: Victims
    avoid: bool
    idle_since: float
    resume: str | None = None
    short: int = 0

    @property
    def order(self) -> tuple[object, ...]:
        c = self.candidate
        # What is suspended competes by time, unless somebody who serves would have to go for it.
        branch = 4 if self.resume is not None and self.branch < 7 else self.branch
        return (branch, self.avoid, c.predicted_ms, self.victims.freed, self.idle_since, c.free_bytes, c.node, c.device_ids)


@dataclass(frozen=True, slots=True)
class _Request:
    """What is to be placed. `avoid`: devices (node/device) where it has just failed."""

    model: Model
    need: int
    waited: float
    extra: bool
    avoid: tuple[str, ...]
    forecast: Forecast
    any_paused: bool
    restored: Instance | None = None


def place(d: Draft, model: Model, waited: float, *, extra: bool = False, kept_up_only: bool = False) -> Placement:
    """Decide for `model`, which has waited `waited` seconds."""
    trouble = d.state.trouble.get(model.key)
    if kept_up_only and trouble and trouble.not_before > d.now:  # 1
        return Placement("wait", f"backing off after {trouble.failures} failures in a row: {model.error or 'unknown error'}")
    if not any(alive(p) for p in d.state.presence.values()):  # 2
        reason = "no node is alive; start one with `thaw up`, or python -m services.nodeagent and services.loader"
        hopeless = waited > d.policy.no_node_timeout
        return Placement("wait", reason, error=Unavailable(f"{model.key}: {reason}") if hopeless else None)
    request = _Request(
        model,
        need_to_start(d.state, model.card),
        waited,
        extra,
        trouble.avoid if trouble else (),
        Forecast(d.state, model.card),
        bool(d.state.pauses),
    )
    restores = [] if extra else [_consider_restore(d, request, i) for i in d.state.parked(model)]
    considered: list[Candidate | _Option] = list(restores)
    possible = [r for r in restores if isinstance(r, _Option)]
    for devices in shortlists(d, request.need, request.avoid, request.forecast):
        considered += (found := [_consider(d, request, device) for device in devices])
        if options := [f for f in found if isinstance(f, _Option)]:  # 4 to 7
            return _chosen(min([*possible, *options], key=lambda o: o.order), considered)
    if possible:
        return _chosen(min(possible, key=lambda o: o.order), considered)
    candidates = _candidates(considered)
    largest = d.bookings().largest_budget()
    if request.need > largest:  # 3
        text = impossible(model.key, request.need, largest)
        return Placement("impossible", text, candidates, error=InsufficientMemory(text))
    return Placement("wait", _obstacles(candidates, len(d.state.bookings)), candidates)  # 8


def _chosen(best: _Option, considered: list[Candidate | _Option]) -> Placement:
    c = best.candidate
    return Placement(c.way, _why(best), _candidates(considered), c, best.victims.ids, resume=best.resume, short=best.short)


def alive(presence: Presence) -> bool:
    return presence.alive and presence.status is not None and not presence.status.stopping


def _candidates(considered: list[Candidate | _Option]) -> tuple[Candidate, ...]:
    """Those of the first list, for the record, by name."""
    found = [c.candidate if isinstance(c, _Option) else c for c in considered[:SHORTLIST]]
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


def _consider(d: Draft, r: _Request, b: Booking) -> Candidate | _Option:
    """One device: an option with its branch, or a candidate that says why not."""
    if b.closed:
        return _excluded(r, b, b.closed)
    if r.need > b.budget:
        return _excluded(r, b, f"needs {gib(r.need)}, its budget is {gib(b.budget)}", "impossible")
    return _fit(d, r, b)


def _consider_restore(d: Draft, r: _Request, i: Instance) -> Candidate | _Option:
    """The devices of a suspended instance, all of them, for what it lacks to come back: it comes back when the last of them has room."""
    need = share(i, need_bytes(d.state, i))
    request = replace(r, need=max(0, need - left_bytes(d.state, i)), restored=i)
    options = []
    for device_id in i.device_ids:
        b = booking(d.state, i.node, device_id)
        # A node that is cordoned takes nothing new; what is on it may come back.
        if not b.reachable:
            return _excluded(request, b, b.closed)
        if need > b.budget:
            return _excluded(request, b, f"needs {gib(need)}, its budget is {gib(b.budget)}", "impossible")
        found = _fit(d, request, b)
        if isinstance(found, Candidate):
            return found
        options.append(found)
    worst = max(options, key=lambda o: (o.branch, -o.candidate.free_bytes))
    return replace(worst, victims=_together(options), candidate=_over(i, worst, options), avoid=any(o.avoid for o in options))


def _together(options: list[_Option]) -> Victims:
    """Those that leave on any of the devices, each once."""
    named = {n: label for o in options for n, label in zip(o.victims.ids, o.victims.labels, strict=True)}
    return Victims(tuple(named), tuple(named.values()), sum(o.victims.freed for o in options))


def _over(i: Instance, worst: _Option, options: list[_Option]) -> Candidate:
    return worst.candidate.model_copy(update={"device_ids": i.device_ids, "victims": _together(options).labels})


def _fit(d: Draft, r: _Request, b: Booking) -> Candidate | _Option:
    if r.any_paused and d.paused(b.key):
        return _excluded(r, b, "its nodeagent has just refused a reservation")
    if r.need <= b.free:  # 4
        return _option(r, b, 4, Victims())
    if r.need <= b.coming:  # 5
        return _option(r, b, 5, Victims())
    short = r.need - b.coming
    idle = choose_victims(d, b.node, b.device_id, short, r.model, serving=False, spare_wanted=r.extra)
    if idle.enough:  # 6
        return _option(r, b, 6, idle, short)
    if not r.extra and r.waited >= d.policy.preempt_after:  # 7
        serving = choose_victims(d, b.node, b.device_id, short, r.model, serving=True, spare_wanted=False)
        if serving.enough:
            return _option(r, b, 7, serving, short)
    return _excluded(r, b, f"needs {gib(r.need)}, {gib(max(0, b.free))} free of {gib(b.budget)}; {idle.obstacles}")


def _excluded(r: _Request, b: Booking, why: str, way: Way = "wait") -> Candidate:
    return Candidate(node=b.node, device_ids=(b.device_id,), way=way, needed_bytes=r.need, free_bytes=max(0, b.free), excluded=why)


def _option(r: _Request, b: Booking, branch: int, victims: Victims, short: int = 0) -> _Option:
    way: Way = "load" if branch == 4 else "evict_then_load"
    predicted, predicted_ms = r.forecast.on(b, leaving=branch > 4)
    if r.restored is not None:
        way = "restore" if branch == 4 else "evict_then_restore"
        predicted, predicted_ms = r.forecast.restore(r.restored, leaving=branch > 4)
    candidate = Candidate(
        node=b.node,
        device_ids=(b.device_id,),
        way=way,
        predicted_ms=predicted_ms,
        predicted=predicted,
        needed_bytes=r.need,
        free_bytes=max(0, b.free),
        victims=victims.labels,
    )
    idle_since = b.idle_since if branch > 5 else 0.0
    resume = r.restored.instance_id if r.restored is not None else None
    return _Option(candidate, branch, victims, b.key in r.avoid, idle_since, resume, short)


def _why(best: _Option) -> str:
    c = best.candidate
    at = f"{c.node}/{c.device_ids[0]}"
    if best.resume is not None:
        gone = f" once these have left: {', '.join(c.victims)}" if c.victims else ""
        return f"{best.resume} is suspended on {at} and comes back soonest{gone}"
    match best.branch:
        case 4:
            return f"{at} has room and is predicted to be ready soonest"
        case 5:
            return f"{at} has room once those already leaving have left"
        case 6:
            return f"{at} has room once these idle instances have left: {', '.join(c.victims)}"
        case _:
            return f"waited too long: on {at} these are drained though they serve: {', '.join(c.victims)}"
