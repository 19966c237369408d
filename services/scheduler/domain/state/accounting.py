"""Memory accounting: bytes held and promised on each device.

`compute_booking` derives a booking from the instances on the device; `apply` (changes.py) keeps
it in `ClusterState.bookings`.
"""

from __future__ import annotations

from functools import lru_cache

from services.scheduler.domain.cost.links import find_remote_bandwidth
from services.scheduler.domain.state.booking import Booking, device_key
from services.scheduler.domain.state.cluster import ClusterState
from services.scheduler.domain.state.device_memory import per_device_bytes, suspend_frees_bytes, suspended_bytes
from services.scheduler.domain.state.entities import Instance
from services.scheduler.domain.state.shared_weights import units_on, weights_of
from services.scheduler.domain.state.volatile import InstanceReport, Presence
from shared.contracts.node import InstanceState
from shared.errors import InsufficientMemory
from shared.sizing import need_of
from shared.unit_charges import BookedWeights, SharedUnits

_READY = InstanceState.READY


def booking_of(state: ClusterState, node: str, device_id: str) -> Booking:
    """Return the booking of a device, or an empty-budget booking for an unknown device."""
    return state.bookings.get(device_key(node, device_id)) or compute_booking(state, node, device_id)


def compute_booking(state: ClusterState, node: str, device_id: str) -> Booking:
    """Compute the booking of a device.

    Bytes are held from the moment a start is sent until the nodeagent reports the instance gone.
    Promises of full workers count as claimed.
    Bytes that a nodeagent reserves beyond the known instances (a process not proved gone) count
    too; those of failed instances become free soon, so that no instance is stopped to replace
    them. Bytes of instances that should have left long ago do not. Weights that instances of a
    separate device share count once, and so does the executor of shared instances.
    """
    units = units_on(state, node, device_id)
    sharing = _Sharing(units) if units is not None else None
    held = claimed = leaving = going = departing = known = idle = movable = executor = 0
    idle_since = float("inf")
    key, instances, reports = device_key(node, device_id), state.instances, state.reports
    for instance_id in state.by_device.get(key, ()):
        i, report = instances[instance_id], reports.get(instance_id)
        executor = max(executor, needed_executor_bytes(state, i))
        if i.sent_at is None:
            claimed += per_device_bytes(i, i.reserve_bytes) - (suspended_bytes(state, i) if report is not None else 0)
            if sharing is not None:
                sharing.add(weights_of(state, i), is_claim=True)
            continue
        parked = i.state.parked
        holds = suspended_bytes(state, i) if parked else per_device_bytes(i, i.reserve_bytes)
        held += holds
        is_known = report is not None and (parked or report.status.state.holds_memory)
        if is_known:
            known += holds
        drained = is_drained(report)
        departs = drained or is_idle_and_asked(i, report)
        leaves = i.leaving != "no" and not (report is not None and report.is_stuck)
        if sharing is not None:
            sharing.add(weights_of(state, i), is_known=is_known, is_leaving=leaves, is_drained=drained, is_departing=departs)
        if i.leaving != "no":
            suspends = i.leaving in ("suspend", "suspend_if_idle")
            freed = (suspend_frees_bytes(state, i) if i.state is _READY else _count_bytes_to_free(state, i)) if suspends else holds
            leaving += freed if leaves else 0
            going += freed if leaves and drained else 0
            departing += freed if leaves and departs else 0
        elif parked:
            if holds and not _is_pinned(state, i):
                movable += holds
                idle += holds
                idle_since = min(idle_since, i.ready_at or 0.0)
        elif i.state is _READY:
            if not _is_pinned(state, i):
                movable += holds
                if report is not None and report.idle_since is not None:
                    idle += holds
                    idle_since = min(idle_since, report.idle_since)
        elif i.trigger == "park" and i.state.starting:  # a start for parking gives way to demand
            movable += holds
            idle += holds
            idle_since = min(idle_since, i.planned_at)
    for stage in (state.later_stages[s] for s in state.stages_on.get(key, ())):
        if stage.sent_at is None:
            claimed += stage.reserve_bytes
            continue
        holds, first, report = stage.reserve_bytes, instances.get(stage.first), reports.get(stage.first)
        held += holds
        known += holds if stage.reported else 0
        if first is None or first.leaving != "no":  # the stage follows the first one
            holds = 0 if report is not None and report.is_stuck else holds
            leaving += holds
            drained = first is None or is_drained(report)
            going += holds if drained else 0
            departing += holds if drained or (first is not None and is_idle_and_asked(first, report)) else 0
        elif first.state is _READY and not _is_pinned(state, first):
            movable += holds
            if report is not None and report.idle_since is not None:
                idle += holds
                idle_since = min(idle_since, report.idle_since)
    if sharing is not None:
        held -= sharing.held
        claimed -= sharing.claimed
        leaving -= sharing.leaving
        going -= sharing.drained
        departing -= sharing.departing
        known -= sharing.known
    promises = [state.full_workers[f] for f in state.promised_on.get(key, ())] if state.full_workers else ()
    promised = sum([f.reserve_bytes for f in promises if f.used_by is None])
    claimed += promised
    presence = state.presence.get(node)
    reported = presence.status if presence else None
    for device in reported.devices if reported else ():
        if device.device_id == device_id:
            unknown = max(0, device.reserved_bytes - device.executor_bytes - known)
            held += unknown
            if unknown and presence is not None:
                leaving += min(unknown, _count_failed_bytes(state, presence, device_id))
            executor = max(executor, device.executor_bytes)
            break
    held += executor
    found = state.nodes.get(node)
    budget = 0
    for own in found.devices if found else ():
        if own.device_id == device_id:
            budget = own.budget_bytes
            break
    closed = ""
    reachable = presence is not None and presence.alive and reported is not None and not reported.stopping
    if not reachable:
        closed = "the node is silent or stopping"
    elif found is None or found.cordoned:
        closed = "the node is cordoned"
    loader = state.loaders.get(node)
    free = budget - held - claimed
    speed = rounded_speed(loader.status.bytes_per_second) if loader else None
    return Booking(
        key=key,
        node=node,
        device_id=device_id,
        budget_bytes=budget,
        held_bytes=held,
        claimed_bytes=claimed,
        leaving_bytes=leaving,
        free_bytes=free,
        free_soon_bytes=free + leaving,
        idle_bytes=idle,
        evictable_bytes=movable,
        idle_since=idle_since,
        closed_reason=closed,
        is_reachable=reachable,
        bytes_per_second=speed,
        remote_bytes_per_second=rounded_speed(find_remote_bandwidth(loader.status)) if loader else None,
        drained_bytes=going,
        departing_bytes=departing,
        is_separate=sharing is not None,
        promised_bytes=promised,
        executor_bytes=executor,
    )


def needed_executor_bytes(state: ClusterState, i: Instance) -> int:
    """Return the bytes of the executor that an instance is attached to; 0: to none."""
    model = state.models.get(i.model)
    if model is None or i.state.parked or len(i.device_ids) != 1:
        return 0
    return need_of(model.card).executor


class _Sharing:
    """Deductions from the sums of a separate device's bookings, because weights are shared."""

    def __init__(self, units: SharedUnits) -> None:
        self._units = units
        self._claims: list[BookedWeights] = []
        self._known: list[BookedWeights] = []
        self._stay: list[BookedWeights] = []
        self._drain: list[BookedWeights] = []
        self._depart: list[BookedWeights] = []
        self._leave: list[BookedWeights] = []

    def add(
        self,
        weights: BookedWeights | None,
        *,
        is_claim: bool = False,
        is_known: bool = False,
        is_leaving: bool = False,
        is_drained: bool = False,
        is_departing: bool = False,
    ) -> None:
        """Add the weights of one instance.

        Args:
            is_departing: It has drained, or is about to.
        """
        if weights is None:
            return
        kept = self._stay if not is_leaving else self._drain if is_drained else self._depart if is_departing else self._leave
        (self._claims if is_claim else kept).append(weights)
        if is_known:
            self._known.append(weights)

    @property
    def held(self) -> int:
        return self._units.saving(self._sent)

    @property
    def claimed(self) -> int:
        return self._units.saving([*self._sent, *self._claims]) - self.held if self._claims else 0

    @property
    def known(self) -> int:
        return self._units.saving(self._known)

    @property
    def leaving(self) -> int:
        """Units of stopping instances that others keep."""
        return self._sum_kept([*self._drain, *self._depart, *self._leave], [*self._stay, *self._claims])

    @property
    def drained(self) -> int:
        return self._sum_kept(self._drain, [*self._stay, *self._depart, *self._leave, *self._claims])

    @property
    def departing(self) -> int:
        return self._sum_kept([*self._drain, *self._depart], [*self._stay, *self._leave, *self._claims])

    @property
    def _sent(self) -> list[BookedWeights]:
        return [*self._stay, *self._leave, *self._depart, *self._drain]

    def _sum_kept(self, gone: list[BookedWeights], stay: list[BookedWeights]) -> int:
        if not gone:
            return 0
        return self._units.saving([*stay, *gone]) - self._units.saving(stay, gone)


def is_drained(report: InstanceReport | None) -> bool:
    """True if an instance that is to stop has no requests left."""
    if report is None or report.status.state is not InstanceState.DRAINING:
        return False
    return not (report.status.load.active or report.status.load.waiting)


def is_idle_and_asked(i: Instance, report: InstanceReport | None) -> bool:
    """True if an instance without requests is asked to stop, unless one arrives first."""
    return i.leaving == "if_idle" and report is not None and report.idle_since is not None


def _count_failed_bytes(state: ClusterState, presence: Presence, device_id: str) -> int:
    """Return the bytes that failed instances, whose processes end, still reserve on a device.

    Those of processes that should have ended long ago are not counted. Nor are those of starts that
    lacked memory (of the host, for example): another start in their place would lack it too, and
    has to stop another instance.
    """
    return sum(
        s.memory.reserved // max(1, len(s.device_ids))
        for s in (presence.status.instances if presence.status is not None else ())
        if s.state is InstanceState.FAILED
        and s.instance_id not in presence.stuck
        and device_id in s.device_ids
        and s.instance_id not in state.instances
        and (s.error is None or s.error.code != InsufficientMemory.code)
    )


def _count_bytes_to_free(state: ClusterState, i: Instance) -> int:
    """Return the bytes that an instance under suspension still frees."""
    report = state.reports.get(i.instance_id)
    return max(0, per_device_bytes(i, i.reserve_bytes) - per_device_bytes(i, report.status.suspension.left_bytes if report else 0))


def _is_pinned(state: ClusterState, i: Instance) -> bool:
    model = state.models.get(i.model)
    return model is not None and model.card.spec.pin


@lru_cache(maxsize=1024)
def rounded_speed(bytes_per_second: float | None) -> float | None:
    return None if bytes_per_second is None else float(f"{bytes_per_second:.1e}")


def claims_on(state: ClusterState, node: str, device_id: str) -> list[Instance]:
    """Return the claims that wait for memory of the device, also for later stages, oldest first."""
    found = [i for i in state.holders_on(node, device_id) if i.sent_at is None]
    return sorted(found, key=lambda i: (i.planned_at, i.token)) if len(found) > 1 else found
