"""A device's instances as a policy sees them, and the check of the victims it chooses.

Never a victim: an instance that is pinned, kept by `replicas.min`, starting, stopping, or that has
just refused; and one younger than `min_active_s` whose own requests are on their way. Without
`may_preempt`: one that serves, unless its requests can migrate, or its keys have received more than
their share (`demand.key_shares.may_interrupt`). With a `standing`: one that other keys use, idle
between two requests or serving, and that shares keep from the waiting model
(`demand.key_shares.is_shielded`). Stopping instances, claims and the model's own instances are left
out: the device's booking accounts for them.
"""

from __future__ import annotations

from services.scheduler.domain.cost.formulas import request_rate, reuse_odds
from services.scheduler.domain.demand.key_shares import Standing, is_in_use, is_shielded, is_used_only_by, may_interrupt
from services.scheduler.domain.estimates.migration_times import resume_requests_s
from services.scheduler.domain.estimates.start_times import restart_s
from services.scheduler.domain.placement.migration_targets import migration_targets
from services.scheduler.domain.placement.request import PlacementRequest
from services.scheduler.domain.policies.port import Clearance, DeviceView, Resident
from services.scheduler.domain.state.booking import Booking
from services.scheduler.domain.state.device_memory import can_suspend, held_bytes, per_device_bytes, suspended_bytes
from services.scheduler.domain.state.entities import Instance, Model
from services.scheduler.domain.state.shared_weights import kv_lacking_bytes, weights_of
from services.scheduler.domain.state.transaction import Transaction
from services.scheduler.domain.state.volatile import InstanceReport
from services.scheduler.domain.values import value
from shared.contracts.node import InstanceState


def clear_device(
    tx: Transaction, request: PlacementRequest, b: Booking, short: int, *, failed: bool
) -> tuple[DeviceView, Clearance | str]:
    """Return the device, and the victims that free `short` bytes, or why there are too few."""
    terms = _terms(tx, request, b, short)
    view = device_view(tx, b, failed=failed, residents=_list_residents(tx, request, b, terms))
    clearance = request.profile.clear(request.ask, view, short, tx.now)
    if clearance is not None and _is_valid(tx, terms, view, clearance, short):
        return view, clearance
    obstacles = "; ".join(f"{r.model} ({r.key}) {r.protected_reason}" for r in view.residents if r.protected_reason)
    return view, obstacles or "no instance there can be evicted"


def device_view(tx: Transaction, b: Booking, *, failed: bool, residents: tuple[Resident, ...] = ()) -> DeviceView:
    lacking = kv_lacking_bytes(tx.state, b) if b.is_separate else 0
    return DeviceView(
        b.key,
        b.node,
        b.budget_bytes,
        b.free_bytes,
        b.free_soon_bytes,
        residents,
        has_failed=failed,
        kv_lacking_bytes=lacking,
    )


NOISE_S = 0.05
"""Two measurements of one start differ by this much: of equal instances the longest idle goes."""


@value(frozen=True, slots=True)
class _Terms:
    """The properties of a request that the description of residents depends on."""

    may_preempt: bool
    is_extra: bool
    priority: int
    interrupts: bool
    """It has waited long enough to interrupt models of other keys."""
    standing: Standing | None
    """The request's standing."""


def _terms(tx: Transaction, request: PlacementRequest, b: Booking, short: int) -> _Terms:
    ask, standing = request.ask, request.standing
    if standing is None or (request.is_last_resort and not _has_turns(tx, standing, b, short)):
        return _Terms(request.may_preempt, ask.is_extra, 0, False, None)
    interrupts = not ask.is_extra and ask.waited_s >= tx.policy.min_active_s
    return _Terms(request.may_preempt, ask.is_extra, ask.priority, interrupts, standing)


def _has_turns(tx: Transaction, standing: Standing, b: Booking, short: int) -> bool:
    """True if instances on the device that only the waiting keys use hold enough for the model.

    They leave for it in turn, after they have served.
    """
    own = [i for i in tx.state.holders_on(b.node, b.device_id) if i.leaving == "no" and not i.state.parked]
    free = [i for i in own if is_used_only_by(tx.state, standing.flows, i.model) and not _is_kept(tx, i)]
    return sum([per_device_bytes(i, i.reserve_bytes) for i in free]) >= short


def _is_kept(tx: Transaction, i: Instance) -> bool:
    owner = tx.state.models.get(i.model)
    return owner is not None and (owner.card.spec.pin or owner.min_replicas > 0)


def _list_residents(tx: Transaction, request: PlacementRequest, b: Booking, terms: _Terms) -> tuple[Resident, ...]:
    """Return the instances that hold memory of the device and could leave, as one or as a stage."""
    residents = tx.memoize(("residents", b.key, terms), lambda: _describe_residents(tx, terms, b))
    return tuple([r for r in residents if r.model != request.model.key])


def _describe_residents(tx: Transaction, terms: _Terms, b: Booking) -> list[Resident]:
    there = tx.state.holders_on(b.node, b.device_id)
    return [_describe_resident(tx, i, terms, b) for i in there if not i.is_claim and i.leaving == "no"]


def _describe_resident(tx: Transaction, i: Instance, terms: _Terms, b: Booking) -> Resident:
    owner = tx.state.models.get(i.model)
    report = tx.state.reports.get(i.instance_id)
    load = report.status.load if report is not None else None
    idle = report.idle_since if report is not None else None
    ready_at = i.ready_at or 0.0
    used = ready_at
    if i.state.parked:
        state = "parked"
    elif i.state.starting:
        state, used = "starting", i.planned_at
    elif idle is None or tx.is_cooling_down(i.instance_id):
        state = "serving"
    else:
        state, used = "idle", idle
    waiting = tx.state.waiting_count(i.model)
    wanted = waiting > 0
    moves = migration_targets(tx, i, owner, b) if state == "serving" and owner is not None and not terms.is_extra else ()
    reload_s = round(_reload_s(tx, i, owner, b) / NOISE_S) * NOISE_S if owner is not None else 0.0
    protected = _explain_protected(
        tx, i, owner, terms, wanted=wanted, stays=not moves and not _may_drain(tx, i, owner, terms, reload_s)
    )
    if protected is None and state == "idle" and is_in_use(i, idle, tx.now) and _is_shielded(tx, i, owner, terms, reload_s):
        protected = "is between two requests of another key, which has not received more"
    return Resident(
        key=i.instance_id,
        model=i.model,
        nbytes=held_bytes(tx.state, i) + (_rounding_bytes(tx, i) if b.is_separate else 0),
        state=state,  # type: ignore[arg-type]  # one of the literals above
        last_used=used,
        ready_at=ready_at,
        active=load.active if load is not None else 0,
        queued=(load.waiting if load is not None else 0) + waiting,  # in its engine, and in gateways
        priority=owner.card.spec.priority if owner is not None else -1000,
        sensitivity=owner.card.spec.latency_sensitivity if owner is not None else 0.0,
        miss_probability=1.0 if wanted or state == "serving" else reuse_odds(tx.now - used, tx.policy.horizon_s),
        reload_s=reload_s,
        requests_per_s=_requests_per_s(i, report, used, tx.now) if state == "idle" else 0.0,
        resume_s=resume_requests_s(tx.state, i) if state == "serving" else None,
        moves=moves,
        replicas=_copies(tx, owner),
        protected_reason=protected or "",
    )


def _requests_per_s(i: Instance, report: InstanceReport | None, used: float, now: float) -> float:
    """Return the requests that an instance has completed per second since it was planned.

    The first ones have arrived while it started. After a change of leaders the new one's first
    report of the instance is the start of both the count and the time.
    """
    if report is None:
        return 0.0
    since = i.planned_at if report.counted_since is None else max(i.planned_at, report.counted_since)
    return request_rate(report.status.load.completed - report.completed_before, now - since, now - used)


def _may_drain(tx: Transaction, i: Instance, owner: Model | None, terms: _Terms, reload_s: float) -> bool:
    """True if a serving instance may be drained: after a long wait, or for the shares of keys."""
    if terms.may_preempt:
        return not _is_shielded(tx, i, owner, terms, reload_s, is_idle=False)
    if terms.standing is None or not terms.interrupts or _precedence(owner, terms) > 0:
        return False
    return may_interrupt(tx.state, terms.standing, i.model, reload_s)


def _is_shielded(
    tx: Transaction, i: Instance, owner: Model | None, terms: _Terms, reload_s: float, *, is_idle: bool = True
) -> bool:
    """True if shares of keys keep an instance in use from the waiting model."""
    if terms.standing is None or _precedence(owner, terms) < 0:
        return False
    return is_shielded(tx, terms.standing, i.model, reload_s, is_idle=is_idle)


def _precedence(owner: Model | None, terms: _Terms) -> int:
    """Return the model's priority above that of the waiting model."""
    return owner.card.spec.priority - terms.priority if owner is not None else 0


def _rounding_bytes(tx: Transaction, i: Instance) -> int:
    """Return what an instance's whole pages take beyond its booked weights.

    What a new instance lacks includes its own, so that a model could not replace an equal one.
    """
    weights = weights_of(tx.state, i)
    return weights.rounding_bytes if weights is not None else 0


def _copies(tx: Transaction, owner: Model | None) -> int:
    """Return how many instances of the model can serve."""
    if owner is None or len(tx.state.by_model.get(owner.key, ())) < 2:
        return 1
    ready, generation = InstanceState.READY, owner.card.generation
    others = tx.state.of_model(owner.key)
    return max(1, len([o for o in others if o.state is ready and o.leaving == "no" and o.generation == generation]))


def _reload_s(tx: Transaction, i: Instance, owner: Model, b: Booking) -> float:
    """Return the seconds to have the instance back: to resume it if possible, else restart it."""
    restart = restart_s(tx.state, owner.card, b)
    if i.state.parked:
        return restart
    report = tx.state.reports.get(i.instance_id)
    resume_ms = report.status.suspension.resume_ms if report is not None and can_suspend(tx.state, i) else None
    return restart if resume_ms is None else min(restart, resume_ms / 1e3)


def _explain_protected(
    tx: Transaction, i: Instance, owner: Model | None, terms: _Terms, *, wanted: bool, stays: bool
) -> str | None:
    """Return why an instance must stay; None: it may leave.

    Args:
        stays: An instance must stay while it serves.
    """
    if owner is not None and owner.card.spec.pin:
        return "is pinned"
    if tx.state.inbound_migration(i.instance_id) is not None:
        return "has requests moving to it"
    if i.state.parked:
        return None if suspended_bytes(tx.state, i) else "is suspended and holds nothing"
    if i.trigger == "park" and i.state.starting:
        return None
    if i.state is not InstanceState.READY or i.ready_at is None:
        return f"is {i.state.value}"
    kept = owner is not None and owner.card.spec.replicas.min > 0 and not owner.sleep_requested
    if owner is not None and kept and i.generation == owner.card.generation:
        ready = sum(1 for other in tx.state.live_instances(owner) if other.state is InstanceState.READY)
        if ready <= owner.card.spec.replicas.min:
            return "is kept by replicas.min"
    if stays and tx.is_cooling_down(i.instance_id):
        return "is serving"
    if terms.is_extra and wanted:
        return "is wanted"
    if i.trigger != "park" and tx.now - i.ready_at < tx.policy.min_active_s and (wanted or _never_served(tx, i)):
        return "has just become ready for its waiting requests"
    if stays and tx.idle_since(i.instance_id) is None:
        return "is serving"
    return None


def _never_served(tx: Transaction, i: Instance) -> bool:
    report = tx.state.reports.get(i.instance_id)
    return report is None or report.status.load.completed == 0


def _is_valid(tx: Transaction, terms: _Terms, view: DeviceView, clearance: Clearance, short: int) -> bool:
    """True if the policy's victims may leave in the way it chose, and free enough."""
    there = {r.key: r for r in view.residents}
    interrupted = [there[v] for v in clearance.victims if v not in clearance.moves and v in there and there[v].state == "serving"]
    if not all(_may_drain(tx, tx.state.instances[r.key], tx.state.models.get(r.model), terms, r.reload_s) for r in interrupted):
        return False
    free_to_go = {r.key: r.nbytes for r in view.residents if not r.protected_reason}
    victims = set(clearance.victims)
    return victims <= free_to_go.keys() and sum(free_to_go[v] for v in victims) >= short
