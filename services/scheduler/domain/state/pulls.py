"""Operators' pulls, stored in Postgres: they continue under the next leader (ADR 0092)."""

from __future__ import annotations

from typing import Literal

from services.scheduler.domain.values import replace, value
from shared.contracts.admin import ModelPulled
from shared.contracts.base import ErrorBody

Tier = Literal["ssd", "dram"]
REQUESTS_KEPT = 64
"""The latest requests of a pull whose repetitions get its answer."""


@value(frozen=True, slots=True)
class Pull:
    """Weights that an operator has ordered to a tier of a node.

    A pull that has ended is kept for a short time with its answer: a request that was lost with its
    leader is repeated, and gets it.

    Attributes:
        requests: Ids of the latest requests that wait for it, or have waited.
        token: Of the last prefetch command for it; 0: none is sent yet.
        sent_at: Time of the last command for it, a cancellation included.
        ended_at: None: it is in progress.
        answer: Of a pull that has ended.
    """

    model: str
    node: str
    tier: Tier
    weights_id: str
    since: float
    requests: tuple[str, ...] = ()
    token: int = 0
    sent_at: float = 0.0
    ended_at: float | None = None
    answer: ModelPulled | ErrorBody | None = None

    @property
    def key(self) -> str:
        return f"{self.tier}/{self.node}/{self.model}"

    @property
    def is_over(self) -> bool:
        return self.ended_at is not None

    def with_request(self, request_id: str) -> Pull:
        """Return the pull with one more request; an empty id is not recorded."""
        if not request_id or request_id in self.requests:
            return self
        return replace(self, requests=(*self.requests, request_id)[-REQUESTS_KEPT:])
