"""Device time that engines have charged to requests, and that no gateway has recorded. Pure.

An engine counts what it has charged to ended requests, and gateways record what arrives of it. The
rest was lost on the way: with messages that a killed NATS had, or with the last half second of a
killed gateway. The owner of the model pays for it, until a gateway records it after all
(docs/adr/0101).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

SETTLED_AFTER_S = 15.0
"""Gateways report every two seconds, and one that starts again what the ended one has left."""
AccountName = tuple[str, str]
"""A model and a kind of devices."""


@dataclass(frozen=True, slots=True)
class Account:
    """Microseconds of one model on one kind of devices, since the ledger has counted them.

    Attributes:
        charged_us: What its engines have charged to requests that ended.
        recorded_us: What gateways have recorded of requests.
        unrecorded_us: What the owner pays because no gateway has recorded it.
    """

    charged_us: int = 0
    recorded_us: int = 0
    unrecorded_us: int = 0


def find_correction(then: Account, now: Account) -> int:
    """Return the microseconds that the owner has to pay more; negative: less.

    What engines have charged arrives here later, or earlier, than what gateways have recorded.
    Therefore one side is that of an earlier time.

    Args:
        then: The account `SETTLED_AFTER_S` ago.
        now: The present account.
    """
    missing = then.charged_us - now.recorded_us - now.unrecorded_us
    if missing > 0:
        return missing
    surplus = then.recorded_us + now.unrecorded_us - now.charged_us
    return -min(max(0, surplus), now.unrecorded_us)


@dataclass(slots=True)
class AccountHistory:
    """Accounts of the last seconds, of which the newest old enough is the earlier one."""

    _seen: deque[tuple[float, Mapping[AccountName, Account]]] = field(default_factory=deque)

    def add(self, now: float, accounts: Mapping[AccountName, Account]) -> None:
        """Remember the present accounts."""
        self._seen.append((now, accounts))
        while len(self._seen) > 1 and self._seen[1][0] <= now - SETTLED_AFTER_S:
            self._seen.popleft()

    def find_settled(self, now: float) -> Mapping[AccountName, Account]:
        """Return the accounts of `SETTLED_AFTER_S` ago; none if they are not known."""
        found: Mapping[AccountName, Account] = {}
        for at, accounts in self._seen:
            if at <= now - SETTLED_AFTER_S:
                found = accounts
        return found
