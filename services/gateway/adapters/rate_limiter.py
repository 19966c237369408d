"""Admission of requests by the limits of their API keys, over all gateways together.

The gateway that owns a key keeps its budget. Other gateways lease from it, ahead of their requests,
so that few requests wait for a message. A gateway that does not answer owns nothing any more. A
gateway without a connection to NATS knows of no other one whether it lives: it admits its equal
share of each limit until it is connected again.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from dataclasses import dataclass

from nats.errors import Error as NatsError
from pydantic import TypeAdapter

from services.gateway.adapters.key_store import KeyStore
from services.gateway.domain.limits.key_budget import KeyBudget
from services.gateway.domain.limits.lease import RENEW_S, Lease
from services.gateway.domain.limits.members import Members
from shared.contracts import subjects
from shared.contracts.keys import ApiKey, KeyLimits
from shared.contracts.limits import PRESENCE_INTERVAL_S, GatewayPresent, LeaseLimits, LimitsLeased
from shared.errors import DeadlineExceeded, RateLimitExceeded, ThawError, Unreachable
from shared.messaging import Mesh
from shared.messaging.connection import PROBE_WITHIN_S, Connection

log = logging.getLogger(__name__)
LEASE_LIMITS: TypeAdapter[LeaseLimits] = TypeAdapter(LeaseLimits)
_MAX_ASKS = 4
"""Owners or grants that one request waits for; each change of owner takes one."""
_LATE_S = 0.25
"""A deadline that is noticed so late: this process was paused, and the answer may not be read yet.
To regard the owner as gone would give the key a second budget.
"""
_PAUSED_S = 1.0
"""A timer that is so late: announcements of other gateways may not be read yet."""
_WORDS = {
    "requests": ("requests per minute", "requests_per_minute"),
    "tokens": ("tokens per minute", "tokens_per_minute"),
    "concurrent": ("concurrent requests", "concurrent_requests"),
}


@dataclass(slots=True)
class Admitted:
    """A request that its key's limits admit.

    Attributes:
        headers: The limits, as OpenAI reports them.
        is_settled: Its end was counted.
    """

    lease: Lease
    estimated_tokens: float
    headers: dict[str, str]
    is_settled: bool = False

    def settle(self, used_tokens: float | None) -> None:
        """The request ended.

        Args:
            used_tokens: Its prompt and completion tokens; None: unknown, as estimated.
        """
        self.is_settled = True
        self.lease.settle(self.estimated_tokens, self.estimated_tokens if used_tokens is None else used_tokens)


def is_limited(key: ApiKey | None) -> bool:
    """True if a key has limits that are counted."""
    return key is not None and not (
        key.requests_per_minute is None and key.tokens_per_minute is None and key.concurrent_requests is None
    )


class RateLimiter:
    """Leases of this gateway, and budgets of the keys that it owns."""

    def __init__(self, mesh: Mesh, gateway_id: str, keys: KeyStore) -> None:
        self._mesh = mesh
        self._id = gateway_id
        self._keys = keys
        self._members = Members(gateway_id)
        self._leases: dict[str, Lease] = {}
        self._budgets: dict[str, KeyBudget] = {}
        self._asking: dict[str, asyncio.Lock] = {}
        self._fixed_headers: dict[str, _FixedHeaders] = {}
        self._spared: set[str] = set()
        """Gateways whose last answer this one may have missed in a pause; again is too often."""

    def _headers(self, key: ApiKey, lease: Lease) -> dict[str, str]:
        """Format the limits as OpenAI's `x-ratelimit-*` headers."""
        held, fixed = lease.answer, self._fixed_headers.get(key.name)
        assert held is not None
        if fixed is None or fixed.answer is not held or fixed.key is not key:
            fixed = self._fixed_headers[key.name] = _FixedHeaders.build(key, held)
        found = fixed.headers.copy()
        if key.requests_per_minute is not None:
            remaining = (held.remaining_requests or 0) + max(0, int(held.requests - lease.used_requests))
            found["x-ratelimit-remaining-requests"] = str(min(key.requests_per_minute, remaining))
        if key.tokens_per_minute is not None:
            remaining = (held.remaining_tokens or 0) + max(0, int(held.tokens - lease.used_tokens))
            found["x-ratelimit-remaining-tokens"] = str(min(key.tokens_per_minute, remaining))
        return found

    def _refusal(self, key: ApiKey, lease: Lease) -> RateLimitExceeded:
        error = _refusal(key, lease)
        error.headers = self._headers(key, lease) if lease.answer is not None else {}
        return error

    async def admit(self, key: ApiKey, tokens: float) -> Admitted:
        """Count a request against the limits of its key.

        Args:
            key: A key with limits.
            tokens: Estimate of its prompt and completion tokens.

        Raises:
            RateLimitExceeded: A limit is exhausted, or the owner of the key does not answer.
        """
        lease = self._leases.get(key.name)
        if lease is None:
            lease = self._leases[key.name] = Lease()
        for _ in range(_MAX_ASKS):
            now = time.monotonic()
            limits, owner = key, self._members.owner(key.name)
            if owner != self._id and not self._mesh.is_connected:
                limits, owner = share_of(key, len(self._members)), self._id
            need = tokens if limits.tokens_per_minute is None else min(tokens, float(limits.tokens_per_minute))
            if lease.admit(limits, need, owner, now):
                return Admitted(lease, need, self._headers(limits, lease))
            if owner != self._id and now < lease.denied_until:
                raise self._refusal(key, lease)
            if owner == self._id:
                self._ask_itself(limits, lease, need, now)
            else:
                await self._ask(key, lease, need, owner)
            if time.monotonic() < lease.denied_until:
                raise self._refusal(limits, lease)
        raise self._refusal(key, lease)

    def _ask_itself(self, key: ApiKey, lease: Lease, tokens: float, now: float) -> None:
        ask = lease.ask(self._id, key, tokens)
        lease.accept_answer(self._budget(key.name).lease(ask, now), self._id, now, now)

    async def _ask(self, key: ApiKey, lease: Lease, tokens: float, owner: str) -> None:
        """Lease from another gateway; requests of one key ask one after the other."""
        lock = self._asking.setdefault(key.name, asyncio.Lock())
        before = lease.asked_at
        async with lock:
            if lease.asked_at != before or self._members.owner(key.name) != owner or not self._mesh.is_connected:
                return  # another request has asked meanwhile, or found that the owner or the connection is gone
            await self._request(key, lease, lease.ask(self._id, key, tokens), owner)

    async def _request(self, key: ApiKey, lease: Lease, ask: LeaseLimits, owner: str, *, is_renewal: bool = False) -> None:
        asked_at, reconnections = time.monotonic(), self._mesh.reconnections
        message = ask.model_copy(update={"key": key.name})
        try:
            answer = await self._mesh.request(subjects.gateway_limits(owner), message, LimitsLeased)
        except (Unreachable, DeadlineExceeded) as e:
            late_s = time.monotonic() - asked_at - message.deadline_ms / 1000
            if isinstance(e, DeadlineExceeded) and late_s > _LATE_S and owner not in self._spared:
                self._spared.add(owner)
                log.info(
                    "this gateway was paused while another one answered about limits", extra={"other": owner, "late_s": late_s}
                )
                return
            if isinstance(e, DeadlineExceeded) and not await self._has_been_connected(reconnections):
                return
            log.info("a gateway does not answer about limits", extra={"other": owner, "error": e.message})
            self._members.remove(owner)
            self._spared.discard(owner)
        except ThawError as e:
            log.warning("failed to lease limits", extra={"key": key.name, "error": e.message})
        else:
            self._spared.discard(owner)
            lease.accept_answer(answer, owner, asked_at, time.monotonic(), is_renewal=is_renewal)

    async def _has_been_connected(self, reconnections: int) -> bool:
        """Return whether this gateway's own connection works, and has not been opened again."""
        return self._mesh.reconnections == reconnections and await self._mesh.probe(PROBE_WITHIN_S)

    def _budget(self, name: str) -> KeyBudget:
        budget = self._budgets.get(name)
        if budget is None:
            budget = self._budgets[name] = KeyBudget()
        return budget

    # Messages of other gateways.

    async def on_lease(self, ask: LeaseLimits) -> LimitsLeased:
        """Grant another gateway a share."""
        now = time.monotonic()
        self._members.on_presence(ask.gateway, now)
        own, budget = self._leases.get(ask.key), self._budget(ask.key)
        if own is not None and own.owner == self._id and own.answer is not None:
            self._give_back(own, ask, budget, now)
        return budget.lease(ask, now)

    def _give_back(self, own: Lease, limits: KeyLimits | LeaseLimits, budget: KeyBudget, now: float) -> None:
        """Return to the budget what this gateway, its owner, has taken ahead."""
        answer = budget.lease(own.renewal(self._id, limits, now, is_owner=True), now)
        own.accept_answer(answer, self._id, now, now, is_renewal=True)

    async def on_presence(self, message: GatewayPresent) -> None:
        if message.leaving:
            self._members.remove(message.gateway)
        elif self._members.on_presence(message.gateway, time.monotonic()):
            await self.announce()

    async def announce(self, *, leaving: bool = False) -> None:
        """Announce this gateway to the others; a failure is logged."""
        try:
            await self._mesh.publish(subjects.GATEWAY_PRESENT, GatewayPresent(gateway=self._id, leaving=leaving))
        except NatsError as e:  # the next announcement follows a second later
            log.info("failed to announce this gateway", extra={"error": repr(e)})

    async def run(self) -> None:
        """Announce this gateway and renew its leases until cancelled, while any key has limits."""
        connection = Connection(self._mesh)
        await self.announce()
        was_needed, interval_s = False, min(PRESENCE_INTERVAL_S, RENEW_S)
        while True:
            slept_at = time.monotonic()
            await asyncio.sleep(interval_s)
            now, is_needed = time.monotonic(), any(map(is_limited, self._keys.list_keys()))
            if is_needed:
                await self.announce()
                connected_since = await connection.find_start(probe=self._members.has_silent(now))
                if not was_needed or now - slept_at > interval_s + _PAUSED_S or connected_since is None:
                    self._members.touch(now)
                else:
                    self._members.expire(now, connected_since)
            was_needed = is_needed
            await self._renew(now)

    async def _renew(self, now: float) -> None:
        keys = {key.name: key for key in self._keys.list_keys()}
        for name, lease in list(self._leases.items()):
            key = keys.get(name)
            if key is None or not is_limited(key):
                if not lease.in_flight:
                    del self._leases[name]
                    self._asking.pop(name, None)
                    self._fixed_headers.pop(name, None)
                continue
            owner = self._members.owner(name)
            if lease.answer is None or lease.owner != owner:
                continue  # the next request asks
            if owner == self._id:
                self._give_back(lease, key, self._budget(name), now)
                continue
            if not self._mesh.is_connected:
                continue
            async with self._asking.setdefault(name, asyncio.Lock()):
                ask = lease.renewal(self._id, key, time.monotonic(), is_owner=False)
                if ask.releases:
                    lease.answer = None
                await self._request(key, lease, ask, owner, is_renewal=True)
                if ask.releases and lease.is_idle(time.monotonic()):
                    lease.answer = None
        for name in [n for n, budget in self._budgets.items() if budget.is_idle(now)]:
            del self._budgets[name]


def share_of(key: ApiKey, gateways: int) -> ApiKey:
    """Return a key with one gateway's equal share of its limits, at least 1 of each."""
    limits = ("requests_per_minute", "tokens_per_minute", "concurrent_requests")
    given = {name: limit for name in limits if (limit := getattr(key, name)) is not None}
    return key.model_copy(update={name: max(1, limit // gateways) for name, limit in given.items()})


@dataclass(frozen=True, slots=True)
class _FixedHeaders:
    """Headers that do not change until the limits or the lease do."""

    key: ApiKey
    answer: LimitsLeased
    headers: dict[str, str]

    @classmethod
    def build(cls, key: ApiKey, answer: LimitsLeased) -> _FixedHeaders:
        found: dict[str, str] = {}
        if key.requests_per_minute is not None:
            found["x-ratelimit-limit-requests"] = str(key.requests_per_minute)
            found["x-ratelimit-reset-requests"] = format_reset(answer.requests_reset_s or 0.0)
        if key.tokens_per_minute is not None:
            found["x-ratelimit-limit-tokens"] = str(key.tokens_per_minute)
            found["x-ratelimit-reset-tokens"] = format_reset(answer.tokens_reset_s or 0.0)
        return cls(key, answer, found)


def format_reset(seconds: float) -> str:
    """Format a duration as OpenAI does: `120ms`, `1.5s`, `6m0s`."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    if seconds < 59.95:
        return f"{seconds:.3g}s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}m{rest}s"


def _refusal(key: ApiKey, lease: Lease) -> RateLimitExceeded:
    held = lease.answer
    name = (held.exhausted if held is not None else None) or "requests"
    words, field = _WORDS[name]
    retry_s = max(held.retry_after_s if held is not None else 1.0, 0.001)
    error = RateLimitExceeded(
        f"Rate limit reached for the API key {key.name}: {getattr(key, field)} {words}. Repeat the request in {format_reset(retry_s)}",
        retry_after_ms=math.ceil(retry_s * 1000),
    )
    error.limit = field
    return error
