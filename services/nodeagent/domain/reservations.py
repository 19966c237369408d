"""The order in which waiting reservations get device memory.

A reservation is for a device set, all or nothing. Higher priority goes first, then longer waiting
time. A smaller reservation may overtake one that does not fit yet, and an important one any other,
but only `PASSES` times. After that the overtaken one goes first, and no other reservation gets
bytes of its devices until it fits. `grant` is pure.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from services.nodeagent.domain.memory import Ledger
from shared.unit_charges import BookedWeights

PASSES = 4


@dataclass(frozen=True)
class Reservation:
    """A request for `nbytes` in total, evenly over `device_ids`.

    Attributes:
        since: Start of its waiting time, in monotonic seconds.
        until: Its deadline, in monotonic seconds.
        passed: How often others overtook it.
        weights: The part of it that is in a separate device's pages.
    """

    instance_id: str
    device_ids: tuple[str, ...]
    nbytes: int
    priority: int
    since: float
    until: float
    passed: int = 0
    weights: BookedWeights | None = None


def by_precedence(queue: Iterable[Reservation]) -> list[Reservation]:
    return sorted(queue, key=lambda r: (r.passed < PASSES, -r.priority if r.passed < PASSES else 0, r.since, r.instance_id))


def grant(queue: tuple[Reservation, ...], ledger: Ledger) -> tuple[Reservation | None, tuple[Reservation, ...]]:
    """The next reservation that fits, or None, and the remaining queue."""
    blocked: set[str] = set()
    for r in by_precedence(queue):
        if blocked.isdisjoint(r.device_ids) and ledger.refusal(r.device_ids, r.nbytes, r.instance_id, r.weights) is None:
            return r, tuple(_count_passed(q, r) for q in queue if q is not r)
        if r.passed >= PASSES:
            blocked.update(r.device_ids)
    return None, queue


def _count_passed(q: Reservation, by: Reservation) -> Reservation:
    """`q` while it waits, with an updated count.

    The count rises if a later reservation got bytes of its devices.
    """
    if q.since < by.since and set(q.device_ids) & set(by.device_ids):
        return replace(q, passed=q.passed + 1)
    return q


def blocking_reservation(queue: tuple[Reservation, ...], device_ids: Iterable[str]) -> Reservation | None:
    """The reservation that must get bytes of these devices before any other."""
    wanted = set(device_ids)
    return next((r for r in by_precedence(queue) if r.passed >= PASSES and wanted.intersection(r.device_ids)), None)
