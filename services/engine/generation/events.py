"""Events from the computing thread to the event loop.

Times are seconds of the monotonic clock.
"""

from __future__ import annotations

from dataclasses import dataclass

from shared.contracts.inference import ChoiceDelta
from shared.errors import ThawError


@dataclass(frozen=True)
class Admitted:
    """The first sequence of the request has a slot."""

    request_id: str
    at: float


@dataclass(frozen=True)
class Progressed:
    """Tokens that a request gained in one step.

    Attributes:
        done: Set in the last event.
        device_s: Seconds of the device that the request has used here so far.
    """

    request_id: str
    deltas: tuple[ChoiceDelta, ...]
    tokens: int
    at: float
    done: bool
    device_s: float = 0.0


@dataclass(frozen=True)
class Yielded:
    """The request stopped, and another engine will resume it.

    All its tokens have been delivered.
    """

    request_id: str


@dataclass(frozen=True)
class Embedded:
    """The vectors of a finished embedding request.

    Attributes:
        device_s: Seconds of the device that the request has used.
    """

    request_id: str
    vectors: tuple[bytes, ...]
    dimensions: int
    device_s: float = 0.0


@dataclass(frozen=True)
class Broken:
    """The request failed; its resources are free."""

    request_id: str
    error: ThawError


Event = Admitted | Progressed | Yielded | Embedded | Broken
