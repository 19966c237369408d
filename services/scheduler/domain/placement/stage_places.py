"""The devices that the stages of a group on several nodes can have.

A device has room for a stage, or victims make room there, chosen by the rules for one device
(victims.py). The memory of all stages is promised together. The start is a claim until every device
has it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from services.scheduler.domain.estimates.start_times import Forecast, Prediction
from services.scheduler.domain.placement.options import (
    DeviceFit,
    FeasiblePlacement,
    combine,
    cost_with_clearing,
    list_shortfalls,
    open_for,
    targets_conflict,
)
from services.scheduler.domain.placement.request import PlacementRequest
from services.scheduler.domain.policies.port import NOTHING_TO_CLEAR, Clearance, Option
from services.scheduler.domain.state.booking import Booking, device_key
from services.scheduler.domain.state.shared_weights import needed_bytes
from services.scheduler.domain.state.transaction import Transaction

CLEARED = 8
"""Devices to be cleared that are considered: their victims are examined one by one."""


class StagePlace(NamedTuple):
    """A device that a stage can have.

    Attributes:
        prediction: Prediction for the stage alone on its node.
        sharing: The instances and stages that stay on the device.
    """

    booking: Booking
    fit: DeviceFit
    prediction: Prediction
    sharing: int

    def rank(self, r: PlacementRequest) -> tuple[object, ...]:
        """Return the order of places: the least sum of its own time and of the victims' loss."""
        b, clearance = self.booking, self.fit.clearance
        seconds = self.prediction.ms / 1e3 + clearance.delay_s + clearance.penalty_s / max(1, r.ask.requests)
        return b.key in r.avoid, clearance.how == "preempt", seconds, self.sharing, -b.free_bytes, b.key


def find_stage_places(tx: Transaction, r: PlacementRequest, part: Forecast) -> list[StagePlace]:
    """Return the devices that a stage can have, best first.

    1. Every device with room now. 2. Of those to be cleared, the soonest, longest idle ones.

    Args:
        tx: The decision's transaction.
        r: The model, with the bytes of a stage.
        part: The predicted start of a stage.
    """
    found: list[StagePlace] = []
    to_clear: list[tuple[float, float, Booking]] = []
    refuses = r.refuses
    for node in tx.state.nodes.values():
        for device in node.devices:
            b = tx.state.bookings.get(device_key(node.name, device.device_id))
            if b is None or b.closed_reason or (refuses is not None and refuses(b)):
                continue
            need = needed_bytes(tx.state, b, r.model.card, r.need_bytes)
            if need <= b.free_bytes:  # 1
                found += _place(tx, r, part, b)
            elif need <= b.free_soon_bytes + b.evictable_bytes:
                to_clear.append((part.predict(b, leaving=True).ms, b.idle_since, b))
    to_clear.sort(key=lambda x: (x[2].key in r.avoid, *x[:2], x[2].key))
    found += [place for *_, b in to_clear[:CLEARED] for place in _place(tx, r, part, b)]  # 2
    return sorted(found, key=lambda place: place.rank(r))


def _place(tx: Transaction, r: PlacementRequest, part: Forecast, b: Booking) -> list[StagePlace]:
    fit = open_for(tx, r, b)
    if not isinstance(fit, DeviceFit):
        return []
    there = {i.instance_id for i in tx.state.holders_on(b.node, b.device_id)}
    prediction = part.predict(b, leaving=fit.clearance is not NOTHING_TO_CLEAR)
    return [StagePlace(b, fit, prediction, len(there - set(fit.clearance.victims)))]


def clear_all(places: Sequence[StagePlace]) -> Clearance | None:
    """Return how all devices of a group are cleared; None: two migrations are in conflict."""
    clearance = combine([p.fit.clearance for p in places])
    return None if clearance.moves and targets_conflict(clearance, [p.booking for p in places]) else clearance


def place_group(
    places: Sequence[StagePlace],
    clearance: Clearance,
    slowest: Prediction,
    need: int,
    *,
    hops_s: float = 0.0,
    tpot_s: float = 0.0,
    full_workers: int = 0,
    is_wished: bool = True,
) -> FeasiblePlacement:
    """Return the option of a group, whose start takes as long as its slowest node.

    Args:
        places: The device of each stage.
        clearance: The way in which all of them are cleared.
        slowest: The prediction for the slowest node.
        need: Bytes of each stage.
        hops_s: Seconds of the first token between the stages.
        tpot_s: Seconds of each further token at worst; 0: unknown.
        full_workers: The first ones of `places` that are promised the memory of the whole model.
        is_wished: The number of stages is the model's own setting.
    """
    cost = cost_with_clearing(slowest, clearance)
    cost = cost if not hops_s else type(cost)(cost.total_s + hops_s, cost.phases, cost.spread_s)
    option = Option(
        tuple(p.fit.device for p in places),
        "pipeline",
        cost,
        clearance,
        source=slowest.source,
        stages=len(places),
        full_workers=full_workers,
        tpot_s=tpot_s,
        sharing=0 if is_wished else sum(p.sharing for p in places),
    )
    first, *later = (p.booking for p in places)
    return FeasiblePlacement(
        option,
        first.node,
        (first.device_id,),
        need,
        slowest,
        list_shortfalls(p.fit for p in places),
        later=tuple(b.key for b in later),
        sources=tuple(p.prediction.source for p in places),
        is_wished=is_wished,
    )
