"""HydraServe §4.2: cold starts on a server share its network bandwidth B equally.

A server accepts another one only if all keep their deadlines. Pure: every function takes a ledger
and returns a new one. Inference packets have priority over fetches, so that only fetches are
recorded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from services.scheduler.domain.cost.contention import PendingFetch, meets_eq_3, pending_now


@dataclass(frozen=True, slots=True)
class Fetch:
    """A fetch over a server's link, by HydraServe's symbols.

    Attributes:
        pending: S_i, bytes left at the last change.
        deadline: D_i.
    """

    pending: float
    deadline: float


@dataclass(frozen=True, slots=True)
class Ledger:
    """Fetches of one server.

    Attributes:
        bandwidth: B, bytes per second.
        changed_at: T', last change of the number.
    """

    bandwidth: float
    changed_at: float = 0.0
    fetches: Mapping[str, Fetch] = field(default_factory=dict)


def settle(ledger: Ledger, now: float) -> Ledger:
    """Return Eq. 4, S_i' = S_i - B/N · (T - T'), without finished fetches."""
    if not ledger.fetches:
        return replace(ledger, changed_at=now)
    count, seconds = len(ledger.fetches), now - ledger.changed_at
    left = {k: Fetch(pending_now(f.pending, ledger.bandwidth, count, seconds), f.deadline) for k, f in ledger.fetches.items()}
    return Ledger(ledger.bandwidth, now, {k: f for k, f in left.items() if f.pending})


def share(ledger: Ledger, now: float, joins: bool = False) -> float:
    """Return B / (N + 1) in bytes per second: the b of Eq. 1 and 5 for one more fetch.

    B / N for a worker that joins a fetch of the same bytes.
    """
    others = len(settle(ledger, now).fetches)
    return ledger.bandwidth / max(1, others if joins else others + 1)


def accepts(ledger: Ledger, now: float) -> bool:
    """Check Eq. 3 for every fetch: S_i <= B/(N+1) · (D_i - T).

    The newcomer's own deadline is covered by Eq. 1 with `share`.
    """
    pending = [PendingFetch(f.pending, f.deadline - now) for f in settle(ledger, now).fetches.values()]
    return meets_eq_3(pending, ledger.bandwidth)


def record_begin(ledger: Ledger, key: str, nbytes: int, deadline: float, now: float) -> Ledger:
    """Return the ledger after a worker was assigned."""
    at = settle(ledger, now)
    return replace(at, fetches={**at.fetches, key: Fetch(float(nbytes), deadline)})


def record_end(ledger: Ledger, key: str, now: float) -> Ledger:
    """Return the ledger after a fetch ended or was cancelled."""
    at = settle(ledger, now)
    return replace(at, fetches={k: f for k, f in at.fetches.items() if k != key})
