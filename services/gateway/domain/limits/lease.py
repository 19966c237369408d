"""A gateway's lease of a key's limits: what it may admit without asking the key's owner."""

from __future__ import annotations

from dataclasses import dataclass

from shared.contracts.keys import KeyLimits
from shared.contracts.limits import LeaseLimits, LimitsLeased

VALID_S = 2.5
"""A lease that was not renewed for so long is void. Less than `key_budget.LEASE_S`."""
RENEW_S = 1.0
IDLE_S = 2.0
"""A lease of a key without requests for so long is released."""
_CHUNKS = 16
"""A gateway takes at most this part of a minute's amount ahead of its requests."""
_MAX_DENIED_S = 0.25
"""A refusal is repeated without asking the owner for at most so long."""


@dataclass(slots=True)
class Lease:
    """Running totals of one key on one gateway.

    Attributes:
        used_requests: Requests admitted here since the gateway started.
        used_tokens: Tokens of them: estimated when admitted, corrected when the request ends.
        in_flight: Requests that are active here.
        answer: The owner's last answer, to the ask sent at `asked_at`.
        owner: The gateway that gave it.
        denied_until: Until then requests are refused as the last one was.
        last_used_at: Time of the last request.
    """

    used_requests: float = 0.0
    used_tokens: float = 0.0
    in_flight: int = 0
    answer: LimitsLeased | None = None
    owner: str = ""
    asked_at: float = 0.0
    denied_until: float = 0.0
    last_used_at: float = 0.0

    def admit(self, limits: KeyLimits, tokens: float, owner: str, now: float) -> bool:
        """Count one request of `tokens`, if the lease of the present owner allows it."""
        held = self.answer
        if held is None or self.owner != owner or now - self.asked_at > VALID_S:
            return False
        if limits.requests_per_minute is not None and self.used_requests + 1 > held.requests:
            return False
        if limits.tokens_per_minute is not None and self.used_tokens + tokens > held.tokens:
            return False
        if limits.concurrent_requests is not None and self.in_flight + 1 > held.concurrent:
            return False
        self.count(tokens, now)
        return True

    def count(self, tokens: float, now: float) -> None:
        self.used_requests += 1
        self.used_tokens += tokens
        self.in_flight += 1
        self.last_used_at = now

    def settle(self, estimated: float, used: float) -> None:
        """A request ended: replace its estimate by what it used."""
        self.in_flight -= 1
        self.used_tokens += used - estimated
        self.denied_until = 0.0

    def ask(self, gateway: str, limits: KeyLimits, tokens: float) -> LeaseLimits:
        """Ask for one request of `tokens`, and for some more."""
        held_requests = self.answer.requests - self.used_requests if self.answer is not None else 0.0
        held_tokens = self.answer.tokens - self.used_tokens if self.answer is not None else 0.0
        rpm, tpm, concurrent = limits.requests_per_minute, limits.tokens_per_minute, limits.concurrent_requests
        return LeaseLimits(
            gateway=gateway,
            requests_per_minute=rpm,
            tokens_per_minute=tpm,
            concurrent_requests=concurrent,
            used_requests=self.used_requests,
            used_tokens=self.used_tokens,
            in_flight=self.in_flight,
            need_requests=max(0.0, 1 - held_requests) if rpm is not None else 0.0,
            need_tokens=max(0.0, tokens - held_tokens) if tpm is not None else 0.0,
            need_concurrent=self.in_flight + 1,
            extra_requests=(rpm or 0) // _CHUNKS,
            extra_tokens=(tpm or 0) / _CHUNKS,
            want_concurrent=self.in_flight + 1 + (concurrent or 0) // _CHUNKS,
        )

    def renewal(self, gateway: str, limits: KeyLimits | LeaseLimits, now: float, *, is_owner: bool) -> LeaseLimits:
        """Build the message that keeps the lease, or releases it if the key is idle.

        The owner gives back what it has not used: it asks itself without a message.
        """
        releases = is_owner or self.is_idle(now)
        held = self.answer.concurrent if self.answer is not None else 0
        return LeaseLimits(
            gateway=gateway,
            requests_per_minute=limits.requests_per_minute,
            tokens_per_minute=limits.tokens_per_minute,
            concurrent_requests=limits.concurrent_requests,
            used_requests=self.used_requests,
            used_tokens=self.used_tokens,
            in_flight=self.in_flight,
            want_concurrent=self.in_flight if releases else max(self.in_flight, min(held, self.in_flight + 1)),
            releases=releases,
        )

    def is_idle(self, now: float) -> bool:
        return not self.in_flight and now - self.last_used_at > IDLE_S

    def accept_answer(self, answer: LimitsLeased, owner: str, asked_at: float, now: float, *, is_renewal: bool = False) -> None:
        """Keep the owner's answer to what was asked at `asked_at`."""
        self.answer, self.owner, self.asked_at = answer, owner, asked_at
        if not is_renewal:
            self.denied_until = now + min(answer.retry_after_s, _MAX_DENIED_S) if answer.exhausted is not None else 0.0
