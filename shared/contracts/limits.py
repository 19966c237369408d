"""Gateways lease shares of an API key's limits from the gateway that owns it.

Which gateway owns a key follows from the set of gateways, which each of them announces.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from shared.contracts.base import Deadline, Message, Request

PRESENCE_INTERVAL_S = 1.0


class GatewayPresent(Message):
    """A gateway exists; repeated each second while a key has limits.

    Attributes:
        leaving: It ends.
    """

    kind: Literal["gateway_present"] = "gateway_present"
    gateway: str
    leaving: bool = False


class LeaseLimits(Request):
    """A gateway's usage of a key's limits since its start, and its present needs.

    The limits are those of the gateway's copy of the key. Needs are granted together or not at all.

    Attributes:
        used_requests: Requests that the gateway has admitted.
        used_tokens: Tokens of them; estimated for active ones.
        in_flight: Requests of the key that are active on the gateway.
        need_requests: Requests to grant, beyond those granted and not used.
        need_concurrent: Active requests that the gateway needs in all.
        extra_requests: Further requests to grant if they are there.
        want_concurrent: Active requests that the gateway would hold in all.
        releases: The gateway gives back what it has not used.
    """

    deadline_ms: Deadline = 1_000
    kind: Literal["lease_limits"] = "lease_limits"
    gateway: str
    key: str = ""
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrent_requests: int | None = None
    used_requests: float = Field(ge=0)
    used_tokens: float
    in_flight: int = Field(ge=0)
    need_requests: float = 0.0
    need_tokens: float = 0.0
    need_concurrent: int = 0
    extra_requests: float = 0.0
    extra_tokens: float = 0.0
    want_concurrent: int = 0
    releases: bool = False


class LimitsLeased(Message):
    """The totals that a gateway may use since its start, and what is left in the mesh.

    Attributes:
        requests: Total of requests.
        tokens: Total of tokens.
        concurrent: Requests that may be active on the gateway.
        requests_reset_s: Seconds until all requests of a minute are there again.
        exhausted: The limit that refuses the request; None: it was granted.
        retry_after_s: Seconds until it would be granted.
    """

    kind: Literal["limits_leased"] = "limits_leased"
    requests: float
    tokens: float
    concurrent: int
    remaining_requests: int | None = None
    remaining_tokens: int | None = None
    requests_reset_s: float | None = None
    tokens_reset_s: float | None = None
    exhausted: str | None = None
    retry_after_s: float = 0.0
