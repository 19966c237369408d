"""What the computing thread tells the event loop. Times are seconds of the process's monotonic clock."""

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
    """What a request gained in one step; `done` with its last."""

    request_id: str
    deltas: tuple[ChoiceDelta, ...]
    tokens: int
    at: float
    done: bool


@dataclass(frozen=True)
class Yielded:
    """The request was stopped to go on elsewhere; all that it has gained has been delivered."""

    request_id: str


@dataclass(frozen=True)
class Embedded:
    request_id: str
    vectors: tuple[bytes, ...]
    dimensions: int


@dataclass(frozen=True)
class Broken:
    """The request ended with an error; all that it held is free again."""

    request_id: str
    error: ThawError


Event = Admitted | Progressed | Yielded | Embedded | Broken
