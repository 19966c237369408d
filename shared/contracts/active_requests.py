"""Define the requests that gateways serve now, as every gateway reports them to another one."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from shared.contracts.base import Deadline, Frozen, Message, Request

MAX_LISTED = 200


class ActiveRequestView(Frozen):
    """A request that has not ended.

    States:
        waiting: In the gateway's queue of the model, or in the queue of an engine if it has an
            instance.
        running: An engine has started it.
        following: It gets the response of another request with the same Idempotency-Key.

    Attributes:
        received: Unix seconds.
        ttft_ms: Time to the first token; None: there is none yet.
        output_tokens: Generated so far; 0 for engines that report tokens only at the end.
    """

    request_id: str
    model: str
    endpoint: str
    state: Literal["waiting", "running", "following"]
    received: float
    instance_id: str | None = None
    node: str = ""
    attempts: int = Field(default=0, description="Instances that it was sent to.")
    ttft_ms: float | None = None
    output_tokens: int = 0


class ViewRequests(Request):
    """Ask every gateway for the requests that it serves."""

    deadline_ms: Deadline = 1_000
    kind: Literal["view_requests"] = "view_requests"


class RequestsViewed(Message):
    """The requests that one gateway serves, the oldest first.

    Attributes:
        total: Their number; the list ends after `MAX_LISTED`.
    """

    kind: Literal["requests_viewed"] = "requests_viewed"
    gateway: str
    total: int = Field(default=0, ge=0)
    requests: tuple[ActiveRequestView, ...] = Field(default=(), max_length=MAX_LISTED)
