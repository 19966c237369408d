"""HydraServe §4.2: cold starts on one server share its network bandwidth B equally; a server takes another only if all keep their deadlines.

Pure: every function takes a ledger and gives a new one. Inference packets go before fetches, so that these alone are in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace


@dataclass(frozen=True, slots=True)
class Fetch:
    """`pending`: S_i, bytes to come yet as of the last change; `deadline`: D_i, when they have to be there."""

    pending: float
    deadline: float


@dataclass(frozen=True, slots=True)
class Ledger:
    """One server. `bandwidth`: B, bytes per second; `changed_at`: T', when the number of fetches changed last."""

    bandwidth: float
    changed_at: float = 0.0
    fetches: Mapping[str, Fetch] = field(default_factory=dict)


def settled(ledger: Ledger, now: float) -> Ledger:
    """Eq. 4: S_i' = S_i - B/N · (T - T'); whoever has nothing left has ideally finished and is forgotten."""
    if not ledger.fetches:
        return replace(ledger, changed_at=now)
    came = ledger.bandwidth / len(ledger.fetches) * max(0.0, now - ledger.changed_at)
    left = {k: Fetch(f.pending - came, f.deadline) for k, f in ledger.fetches.items() if f.pending - came > 0}
    return Ledger(ledger.bandwidth, now, left)


def share(ledger: Ledger, now: float) -> float:
    """B / (N + 1): what one more fetch gets, in bytes per second. The b of Eq. 1 and 5 on this server."""
    return ledger.bandwidth / (len(settled(ledger, now).fetches) + 1)


def accepts(ledger: Ledger, now: float) -> bool:
    """Eq. 3: S_i <= B/(N+1) · (D_i - T) for every fetch on it. The newcomer's own deadline is Eq. 1's business, with `share`."""
    each = share(ledger, now)
    return all(f.pending <= each * (f.deadline - now) for f in settled(ledger, now).fetches.values())


def begun(ledger: Ledger, key: str, nbytes: int, deadline: float, now: float) -> Ledger:
    """A worker was assigned: from now on all share with one more."""
    at = settled(ledger, now)
    return replace(at, fetches={**at.fetches, key: Fetch(float(nbytes), deadline)})


def ended(ledger: Ledger, key: str, now: float) -> Ledger:
    """A fetch has come, or was given up."""
    at = settled(ledger, now)
    return replace(at, fetches={k: f for k, f in at.fetches.items() if k != key})
