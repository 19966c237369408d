"""Where one more instance of a model goes. The branches, in this order; the code carries the same numbers:

 1. The model has failed and `replicas.min` alone asks: wait until its back-off is over.
 2. No node is alive: wait, and after `no_node_timeout` tell those who wait (`Unavailable`).
 3. No device of a live node could hold the model even if it were empty: impossible, told at once (`InsufficientMemory`).
 4. Some device has room: take the one predicted to be ready soonest.
 5. Some device has room once those that are leaving already have left: claim it there.
 6. Some device has room once idle instances have left: the longest idle leave (victims.py), the new one claims their bytes.
 7. The model has waited longer than `preempt_after`: as 6, but instances that serve may be drained too.
 8. Otherwise it waits; the reason names what is in the way.

Among devices of one branch: not where it has just failed, then soonest ready, then fewest bytes evicted, then tightest fit.
An extra replica (`extra`) stops after 6, and never displaces a model that has demand. Pure: the state is only read.
"""

from __future__ import annotations

from dataclasses import dataclass

from services.scheduler.domain.booking import booking
from services.scheduler.domain.draft import Draft
from services.scheduler.domain.entities import Model, Node
from services.scheduler.domain.estimates import predict, total
from services.scheduler.domain.victims import Victims, choose_victims
from services.scheduler.domain.words import gib
from shared.contracts.plans import Candidate, Way
from shared.errors import InsufficientMemory, ThawError, Unavailable
from shared.sizing import need_of


@dataclass(frozen=True, slots=True)
class Placement:
    """`chosen` with its victims' ids; or none, with `error` when it is hopeless and `reason` when it waits."""

    way: Way
    reason: str
    candidates: tuple[Candidate, ...] = ()
    chosen: Candidate | None = None
    victims: tuple[str, ...] = ()
    error: ThawError | None = None


@dataclass(frozen=True, slots=True)
class _Option:
    candidate: Candidate
    branch: int
    victims: Victims
    avoid: bool

    @property
    def order(self) -> tuple[object, ...]:
        c = self.candidate
        return (self.branch, self.avoid, c.predicted_ms, self.victims.freed, c.free_bytes, c.node, c.device_ids)


def place(d: Draft, model: Model, waited: float, *, extra: bool = False, kept_up_only: bool = False) -> Placement:
    """Decide for `model`, which has waited `waited` seconds."""
    trouble = d.state.trouble.get(model.key)
    if kept_up_only and trouble and trouble.not_before > d.now:  # 1
        return Placement("wait", f"backing off after {trouble.failures} failures in a row: {model.error or 'unknown error'}")
    nodes = [n for n in d.state.nodes.values() if _alive(d, n)]
    if not nodes:  # 2
        reason = "no node is alive; start one with `thaw up`, or python -m services.nodeagent and services.loader"
        hopeless = waited > d.policy.no_node_timeout
        return Placement("wait", reason, error=Unavailable(f"{model.key}: {reason}") if hopeless else None)
    need = need_of(model.card).total
    largest = max((dev.budget_bytes for n in nodes for dev in n.devices), default=0)
    candidates = []
    options = []
    avoid = trouble.avoid if trouble else ()
    for node in sorted(d.state.nodes.values(), key=lambda n: n.name):
        for device in node.devices:
            option = _consider(d, model, node, device.device_id, need, extra, waited)
            if isinstance(option, Candidate):
                candidates.append(option)
                continue
            candidates.append(option.candidate)
            options.append(_Option(option.candidate, option.branch, option.victims, f"{node.name}/{device.device_id}" in avoid))
    if need > largest:  # 3
        text = impossible(model.key, need, largest)
        return Placement("impossible", text, tuple(candidates), error=InsufficientMemory(text))
    if options:  # 4 to 7
        best = min(options, key=lambda o: o.order)
        return Placement(best.candidate.way, _why(best), tuple(candidates), best.candidate, best.victims.ids)
    return Placement(
        "wait",
        "no device has room: " + "; ".join(f"{c.node}/{c.device_ids[0]}: {c.excluded}" for c in candidates)
        if candidates
        else "no live node has a device",
        tuple(candidates),
    )  # 8


def impossible(name: str, need: int, largest: int) -> str:
    return (
        f"{name} needs {gib(need)} and the largest device budget is {gib(largest)}: add a node with a larger budget, "
        f"or lower max_model_len, max_concurrency or engine_args.kv_cache_bytes"
    )


def _alive(d: Draft, node: Node) -> bool:
    presence = d.state.presence.get(node.name)
    return presence is not None and presence.alive and presence.status is not None and not presence.status.stopping


def _consider(d: Draft, model: Model, node: Node, device_id: str, need: int, extra: bool, waited: float) -> Candidate | _Option:
    booked = booking(d.state, node.name, device_id)
    base = Candidate(node=node.name, device_ids=(device_id,), way="load", needed_bytes=need, free_bytes=max(0, booked.free))

    def excluded(why: str) -> Candidate:
        return base.model_copy(update={"way": "wait", "excluded": why})

    if not _alive(d, node):
        return excluded("the node is silent or stopping")
    if node.cordoned:
        return excluded("the node is cordoned")
    if need > booked.budget:
        return excluded(f"needs {gib(need)}, its budget is {gib(booked.budget)}").model_copy(update={"way": "impossible"})
    if d.paused(f"{node.name}/{device_id}"):
        return excluded("its nodeagent has just refused a reservation")
    if need <= booked.free:  # 4
        return _option(d, model, base, 4, Victims())
    if need <= booked.coming:  # 5
        return _option(d, model, base, 5, Victims())
    short = need - booked.coming
    idle = choose_victims(d, node.name, device_id, short, model, serving=False, spare_wanted=extra)
    if idle.enough:  # 6
        return _option(d, model, base, 6, idle)
    if not extra and waited >= d.policy.preempt_after:  # 7
        serving = choose_victims(d, node.name, device_id, short, model, serving=True, spare_wanted=False)
        if serving.enough:
            return _option(d, model, base, 7, serving)
    return excluded(f"needs {gib(need)}, {gib(max(0, booked.free))} free of {gib(booked.budget)}; {idle.obstacles}")


def _option(d: Draft, model: Model, base: Candidate, branch: int, victims: Victims) -> _Option:
    predicted = predict(d.state, base.node, model.card, leaving=branch > 4)
    update = {
        "way": "load" if branch == 4 else "evict_then_load",
        "predicted": predicted,
        "predicted_ms": total(predicted),
        "victims": victims.labels,
    }
    return _Option(base.model_copy(update=update), branch, victims, False)


def _why(best: _Option) -> str:
    c = best.candidate
    at = f"{c.node}/{c.device_ids[0]}"
    match best.branch:
        case 4:
            return f"{at} has room and is predicted to be ready soonest"
        case 5:
            return f"{at} has room once those already leaving have left"
        case 6:
            return f"{at} has room once these idle instances have left: {', '.join(c.victims)}"
        case _:
            return f"waited too long: on {at} these are drained though they serve: {', '.join(c.victims)}"
