"""One request as the dispatcher knows it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Stage(Enum):
    NEW = "new"
    FOLLOWING = "following"
    """Another request with the same Idempotency-Key generates; this one gets what that one gets."""
    QUEUED = "queued"
    SENT = "sent"
    DONE = "done"


@dataclass(slots=True)
class Ticket:
    """Times are seconds on the gateway's monotonic clock. `begun`: the client has got output that nobody would continue. `resumes`: there is
    output that another instance goes on with. `admitted`: the engine has begun with it, and not only put it in its queue."""

    id: str
    model: str
    arrived: float
    queue_deadline: float
    response_timeout: float
    traceparent: str | None = None
    stage: Stage = Stage.NEW
    instance_id: str | None = None
    node: str = ""
    sent_at: float = 0.0
    heard_at: float = 0.0
    asked_at: float = 0.0
    """When the instance was last asked whether it has the request."""
    missing_at: float = 0.0
    """When it last said that it has not."""
    attempts: int = 0
    queue_timeout: float = 0.0
    refusals: int = 0
    admitted: bool = False
    deaths: int = 0
    """Engines in a row that died under it without a token in between."""
    lost: int = 0
    """Other losses in a row, such as messages that are missing."""
    unheard: int = 0
    losses: int = 0
    begun: bool = False
    resumes: bool = False
    revision: str = ""
    """Of the weights that made what there is."""
    spent: float = 0.0
    """Of the response timeout, by earlier instances."""
    first: str | None = None
    """The instance to be tried before any other."""
    avoid: frozenset[str] = frozenset()
    """Instances that cannot go on with it."""
    attempt_id: str = ""
    """Names the present attempt on the mesh, so that late messages of an earlier one are not taken for its own."""
