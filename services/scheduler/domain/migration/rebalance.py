"""Background rebalancing by migration; off unless a period is set. Pure.

1. Spread: with two hot instances on one device, the less loaded one moves to a device that can hold
   it and serves nothing.
2. Pack: an instance that is cold and alone on its device moves to a fuller device with cold
   instances only, so that its own device becomes free as a whole.

Hot and cold thresholds differ, and packing goes from less to more, so that neither undoes the
other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from services.scheduler.domain.migration.orders import plan_migration
from services.scheduler.domain.state.transaction import Transaction
from services.scheduler.domain.state.volatile import Cooldown
from services.scheduler.domain.values import value
from shared.contracts.node import InstanceState

HOT = 0.5
"""From this share of its capacity an instance is hot."""
COLD = 0.25
"""Up to this share it is cold."""
_PAUSE = "rebalance"


@value(frozen=True, slots=True)
class BusyInstance:
    """An instance that serves, on one device (node/device)."""

    instance_id: str
    device: str
    nbytes: int
    active: int
    capacity: int

    @property
    def hot(self) -> bool:
        return self.active >= HOT * self.capacity

    @property
    def cold(self) -> bool:
        return self.active <= COLD * self.capacity


@value(frozen=True, slots=True)
class FreeDevice:
    """A device where something new may be placed."""

    device: str
    free: int


def propose_move(serving: Sequence[BusyInstance], rooms: Sequence[FreeDevice]) -> tuple[str, str] | None:
    """Return the instance to move and its device; None: nothing to do."""
    on: dict[str, list[BusyInstance]] = {}
    for s in serving:
        on.setdefault(s.device, []).append(s)
    return _spread(on, rooms) or _pack(on, rooms)


def _spread(on: Mapping[str, list[BusyInstance]], rooms: Sequence[FreeDevice]) -> tuple[str, str] | None:
    crowded = [(sum(s.active for s in there), device) for device, there in on.items() if sum(s.hot for s in there) > 1]
    for _, device in sorted(crowded, reverse=True):
        for s in sorted((s for s in on[device] if s.hot), key=lambda s: (s.active, s.instance_id)):
            empty = [r for r in rooms if r.device not in on and r.free >= s.nbytes]
            if empty:
                return s.instance_id, min(empty, key=lambda r: (r.free, r.device)).device
    return None


def _pack(on: Mapping[str, list[BusyInstance]], rooms: Sequence[FreeDevice]) -> tuple[str, str] | None:
    held = {device: sum(s.nbytes for s in there) for device, there in on.items()}
    for device in sorted(on, key=lambda x: (held[x], x)):
        if len(on[device]) != 1 or not on[device][0].cold:
            continue
        s = on[device][0]
        fuller = [
            r
            for r in rooms
            if r.device in on and r.device != device and r.free >= s.nbytes
            if all(x.cold for x in on[r.device]) and (held[r.device], r.device) > (held[device], device)
        ]
        if fuller:
            return s.instance_id, max(fuller, key=lambda r: (held[r.device], r.device)).device
    return None


def rebalance(tx: Transaction) -> None:
    """Order at most one migration, and none while anything else is in progress.

    Called on each tick.
    """
    state = tx.state
    if tx.policy.rebalance_period_s <= 0 or tx.is_cooling_down(_PAUSE) or state.migrations or state.unschedulable or state.claimed:
        return
    tx.put(Cooldown(_PAUSE, tx.now + tx.policy.rebalance_period_s))
    serving = []
    for i in state.instances.values():
        report = state.reports.get(i.instance_id)
        model = state.models.get(i.model)
        if i.state.starting or (report is not None and i.leaving != "no"):
            return
        if report is None or model is None or model.card.spec.pin or i.state is not InstanceState.READY or len(i.device_ids) != 1:
            continue
        active = report.status.load.active + report.status.load.waiting
        if active:
            serving.append(
                BusyInstance(i.instance_id, f"{i.node}/{i.device_ids[0]}", i.reserve_bytes, active, max(1, report.status.capacity))
            )
    rooms = [FreeDevice(b.key, b.free_bytes) for b in state.bookings.values() if not b.closed_reason]
    if (move := propose_move(serving, rooms)) is not None:
        plan_migration(tx, state.instances[move[0]], "rebalance", move[1])
