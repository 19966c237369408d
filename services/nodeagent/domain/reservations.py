"""Who gets bytes of a device next, where several wait for them.

A reservation is for a device set, all of it or nothing. Higher priority goes first, then who has waited longest. A smaller one may
pass one that does not fit yet, and an important one any other, but only `PASSES` times: who was passed so often goes first, and until it
fits nobody gets bytes of its devices. Pure: `grant` says who is next and changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from services.nodeagent.domain.memory import Ledger

PASSES = 4


@dataclass(frozen=True)
class Reservation:
    """`nbytes` in all, evenly over `device_ids`. `until`: it is given up then (seconds). `passed`: how often others went before it."""

    instance_id: str
    device_ids: tuple[str, ...]
    nbytes: int
    priority: int
    since: float
    until: float
    passed: int = 0


def in_order(queue: Iterable[Reservation]) -> list[Reservation]:
    return sorted(queue, key=lambda r: (r.passed < PASSES, -r.priority if r.passed < PASSES else 0, r.since, r.instance_id))


def grant(queue: tuple[Reservation, ...], ledger: Ledger) -> tuple[Reservation | None, tuple[Reservation, ...]]:
    """The next reservation that may be booked now, if any, and the queue without it (with those that it passed, so marked)."""
    blocked: set[str] = set()
    for r in in_order(queue):
        if blocked.isdisjoint(r.device_ids) and ledger.refusal(r.device_ids, r.nbytes, but=r.instance_id) is None:
            return r, tuple(_passed(q, r) for q in queue if q is not r)
        if r.passed >= PASSES:
            blocked.update(r.device_ids)
    return None, queue


def _passed(q: Reservation, by: Reservation) -> Reservation:
    """`q`, which goes on waiting; marked if another that came later got bytes that it wants."""
    if q.since < by.since and set(q.device_ids) & set(by.device_ids):
        return replace(q, passed=q.passed + 1)
    return q


def blocked_by(queue: tuple[Reservation, ...], device_ids: Iterable[str]) -> Reservation | None:
    """Who must have bytes of these devices before anybody else does."""
    wanted = set(device_ids)
    return next((r for r in in_order(queue) if r.passed >= PASSES and wanted.intersection(r.device_ids)), None)
