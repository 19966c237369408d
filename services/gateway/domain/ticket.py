"""The dispatcher's state of one request."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Stage(Enum):
    """The state of a request."""

    NEW = "new"
    FOLLOWING = "following"
    """The request replays the response of another one with the same Idempotency-Key."""
    QUEUED = "queued"
    SENT = "sent"
    DONE = "done"


@dataclass(slots=True)
class Ticket:
    """One request. Times are seconds on the gateway's monotonic clock.

    Attributes:
        stage: The state of the request.
        instance_id: The instance that has the request; None while it waits.
        sent_at: Time at which the present attempt was sent.
        last_message_at: Time at which the present attempt's last message arrived; 0: none has.
        disturbed_at: Time at which messages of the request may have been lost.
        probed_at: Time at which the instance was last asked whether it has the request.
        reported_missing_at: Time at which the instance last reported that it does not have the
            request.
        attempts: Instances that the request was sent to.
        attempt_id: Names the present attempt on the mesh. Late messages of an earlier attempt
            carry another id.
        refusals: Refusals in a row, without output in between.
        engine_deaths: Engines in a row that died under the request, without output in between.
        message_losses: Other losses in a row, such as missing messages.
        losses_before_admission: Losses in a row while the request waited inside an engine.
        losses: All losses of an instance.
        is_admitted: The engine has started the request, rather than queued it.
        is_committed: The client has received output that no other engine can continue.
        is_resumable: True if there is output that another instance can continue.
        revision: Revision of the weights that generated the output.
        elapsed_s: Part of the response timeout that earlier instances used.
        preferred_instance: The instance to try before any other.
        excluded_instances: Instances that cannot resume the response.
        key: Name of the client's API key, whose requests share the model fairly with others'.
        cost: Predicted size of the request in tokens, divided by the weight of its key.
        weight: Share of the key relative to other keys.
        priority: Waiting requests of a higher priority are served first.
        start_tag: Place in the order of fair queueing (`fair_queue`).
    """

    id: str
    model: str
    arrived_at: float
    queue_deadline: float
    response_timeout_s: float
    traceparent: str | None = None
    stage: Stage = Stage.NEW
    instance_id: str | None = None
    node: str = ""
    sent_at: float = 0.0
    last_message_at: float = 0.0
    disturbed_at: float = 0.0
    probed_at: float = 0.0
    reported_missing_at: float = 0.0
    attempts: int = 0
    queue_timeout_s: float = 0.0
    refusals: int = 0
    is_admitted: bool = False
    engine_deaths: int = 0
    message_losses: int = 0
    losses_before_admission: int = 0
    losses: int = 0
    is_committed: bool = False
    is_resumable: bool = False
    revision: str = ""
    elapsed_s: float = 0.0
    preferred_instance: str | None = None
    excluded_instances: frozenset[str] = frozenset()
    attempt_id: str = ""
    key: str = ""
    cost: float = 1.0
    weight: float = 1.0
    priority: int = 0
    start_tag: float = 0.0

    @property
    def queue_order(self) -> tuple[int, float, float, bool]:
        """Position among waiting requests; of equal ones those that had an instance are first."""
        return -self.priority, self.start_tag, self.arrived_at, not self.attempts

    @property
    def last_activity_at(self) -> float:
        """Time at which the present attempt was sent, or sent its last message."""
        return max(self.last_message_at, self.sent_at)
