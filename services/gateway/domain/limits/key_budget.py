"""The limits of a key over all gateways: the state of the gateway that owns the key.

1. Requests and tokens come from one token bucket each. A lease adds to what its gateway may use in
   all since its start (`granted`); the gateway reports what it has used in all. Both are running
   totals, so a lost or repeated message changes nothing.
2. A gateway that used more than it was granted (responses longer than estimated) is charged.
3. A gateway that releases its lease has used what it says, and the rest returns to the bucket.
4. Concurrent requests are a number for each gateway, whose sum is at most the limit. A gateway
   keeps at least those that are in flight.
5. A gateway that was silent for LEASE_S holds no concurrent requests any more.
6. A gateway that the owner does not know, or that counts from the beginning again, begins with
   what it has used: an earlier lease is void.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from services.gateway.domain.limits.token_bucket import TokenBucket
from shared.contracts.limits import LeaseLimits, LimitsLeased

LEASE_S = 4.0
"""Seconds after which a silent gateway's concurrent requests are free. A gateway regards its lease
as void earlier (`lease.VALID_S`).
"""
_CONCURRENT_RETRY_S = 0.5
"""Time to retry when too many requests are active; no process knows when one ends."""


@dataclass(slots=True)
class _Lessee:
    requests: float
    tokens: float
    used_requests: float
    concurrent: int = 0
    seen_at: float = 0.0


@dataclass(slots=True)
class KeyBudget:
    """Buckets of one key, and what each gateway holds of them."""

    requests: TokenBucket | None = None
    tokens: TokenBucket | None = None
    _lessees: dict[str, _Lessee] = field(default_factory=dict)

    def lease(self, ask: LeaseLimits, now: float) -> LimitsLeased:
        """Grant what the gateway needs if all of it is there, and report its new totals."""
        self.requests = _resize(self.requests, ask.requests_per_minute, now)
        self.tokens = _resize(self.tokens, ask.tokens_per_minute, now)
        lessee = self._lessees.get(ask.gateway)
        if lessee is None or ask.used_requests < lessee.used_requests:  # 6
            lessee = self._lessees[ask.gateway] = _Lessee(ask.used_requests, ask.used_tokens, ask.used_requests)
        lessee.seen_at, lessee.used_requests = now, ask.used_requests
        self._settle(lessee, ask)
        waits = self._grant(lessee, ask, now)
        return LimitsLeased(
            requests=lessee.requests,
            tokens=lessee.tokens,
            concurrent=lessee.concurrent,
            remaining_requests=max(0, math.floor(self.requests.level)) if self.requests else None,
            remaining_tokens=max(0, math.floor(self.tokens.level)) if self.tokens else None,
            requests_reset_s=self.requests.full_in_s if self.requests else None,
            tokens_reset_s=self.tokens.full_in_s if self.tokens else None,
            exhausted=waits[0] if waits else None,
            retry_after_s=waits[1] if waits else 0.0,
        )

    def _settle(self, lessee: _Lessee, ask: LeaseLimits) -> None:
        for bucket, granted, used in (
            (self.requests, lessee.requests, ask.used_requests),
            (self.tokens, lessee.tokens, ask.used_tokens),
        ):
            if bucket is not None and (used > granted or ask.releases):  # 2 and 3
                bucket.charge(used - granted)
        if ask.releases:
            lessee.requests, lessee.tokens = ask.used_requests, ask.used_tokens
        lessee.requests = max(lessee.requests, ask.used_requests)
        lessee.tokens = max(lessee.tokens, ask.used_tokens)

    def _grant(self, lessee: _Lessee, ask: LeaseLimits, now: float) -> tuple[str, float] | None:
        """Grant all needs, or none; return what is exhausted and when it is there."""
        waits: list[tuple[str, float]] = []
        lessee.concurrent = max(ask.in_flight, min(lessee.concurrent, ask.want_concurrent))
        if ask.concurrent_requests is not None:  # 4
            free = ask.concurrent_requests - self._held_by_others(ask.gateway, now)
            lessee.concurrent = max(ask.in_flight, min(ask.want_concurrent, free))
            if ask.need_concurrent > lessee.concurrent:
                waits.append(("concurrent", _CONCURRENT_RETRY_S))
        for name, bucket, need in (
            ("requests", self.requests, ask.need_requests),
            ("tokens", self.tokens, ask.need_tokens),
        ):
            if bucket is not None and bucket.level < need:
                waits.append((name, bucket.wait_s(need)))
        if waits:
            return max(waits, key=lambda wait: wait[1])
        if self.requests is not None and ask.need_requests > 0:
            lessee.requests += self.requests.take(ask.need_requests, ask.extra_requests)
        if self.tokens is not None and ask.need_tokens > 0:
            lessee.tokens += self.tokens.take(ask.need_tokens, ask.extra_tokens)
        return None

    def _held_by_others(self, gateway: str, now: float) -> int:
        for name in [n for n, other in self._lessees.items() if now - other.seen_at > LEASE_S]:
            del self._lessees[name]  # 5
        return sum(other.concurrent for name, other in self._lessees.items() if name != gateway)

    def is_idle(self, now: float) -> bool:
        """True if forgetting the budget changes nothing: full buckets, and no gateway uses it."""
        for bucket in (self.requests, self.tokens):
            if bucket is not None:
                bucket.refill(now)
                if bucket.level < bucket.per_minute:
                    return False
        return all(now - lessee.seen_at > LEASE_S for lessee in self._lessees.values())


def _resize(bucket: TokenBucket | None, per_minute: int | None, now: float) -> TokenBucket | None:
    if per_minute is None:
        return None
    if bucket is None:
        return TokenBucket.full(per_minute, now)
    if bucket.per_minute != per_minute:
        bucket.resize(per_minute, now)
    bucket.refill(now)
    return bucket
