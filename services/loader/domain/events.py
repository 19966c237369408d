"""What may happen to the loader (events), and what it may want done (effects)."""

from __future__ import annotations

from dataclasses import dataclass, field

from services.loader.domain.state import Until
from shared.contracts.base import ErrorBody
from shared.contracts.models import ModelCard

# -- events --------------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Prepare:
    reply: int
    instance_id: str
    card: ModelCard
    token: int
    traceparent: str | None = None


@dataclass(frozen=True)
class Attach:
    reply: int
    instance_id: str
    card: ModelCard
    until: Until
    traceparent: str | None = None


@dataclass(frozen=True)
class Release:
    reply: int
    instance_id: str


@dataclass(frozen=True)
class Abandoned:
    """The request `reply` is over without an answer: its deadline has passed."""

    reply: int


@dataclass(frozen=True)
class NodeHeard:
    """A status of this node's nodeagent; `instances` are those it still knows."""

    instances: frozenset[str]


@dataclass(frozen=True)
class Fetched:
    """`fetched` bytes of the files have come from the remote source so far."""

    weights_id: str
    run: int
    fetched: int


@dataclass(frozen=True)
class Indexed:
    weights_id: str
    run: int
    segment: str
    directory: str
    total_bytes: int


@dataclass(frozen=True)
class Progressed:
    """`loaded` bytes of the segment are there."""

    weights_id: str
    run: int
    loaded: int


@dataclass(frozen=True)
class Completed:
    weights_id: str
    run: int


@dataclass(frozen=True)
class Failed:
    """The run has ended in an error; its segment is removed already."""

    weights_id: str
    run: int
    error: ErrorBody


@dataclass(frozen=True)
class Left:
    """A run called off, or a removal, is done: `freed` bytes are proved gone."""

    weights_id: str
    run: int
    freed: int


@dataclass(frozen=True)
class Adopt:
    """A complete segment of an earlier loader process, found and checked at the start."""

    weights_id: str
    model: str
    segment: str
    directory: str
    total_bytes: int
    holders: tuple[str, ...]


@dataclass(frozen=True)
class Stop:
    """The process is to end: finish nothing, keep what is complete and held."""


Event = (
    Prepare | Attach | Release | Abandoned | NodeHeard | Fetched | Indexed | Progressed | Completed | Failed | Left | Adopt | Stop
)  # fmt: skip

# -- effects -------------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StartRun:
    weights_id: str
    run: int
    card: ModelCard
    traceparent: str | None = None


@dataclass(frozen=True)
class CancelRun:
    """Call the run off; `Left` (or `Completed`, if it was too late) follows."""

    weights_id: str
    run: int


@dataclass(frozen=True)
class RemoveSegment:
    """Remove a complete segment and its record; `Left` follows."""

    weights_id: str
    run: int
    segment: str


@dataclass(frozen=True)
class Remember:
    """Write down who holds a complete segment."""

    weights_id: str


@dataclass(frozen=True)
class Accepted:
    reply: int


@dataclass(frozen=True)
class Attached:
    reply: int
    weights_id: str


@dataclass(frozen=True)
class Freed:
    reply: int
    freed: int


@dataclass(frozen=True)
class Refused:
    reply: int
    error: ErrorBody = field(repr=False)


Effect = StartRun | CancelRun | RemoveSegment | Remember | Accepted | Attached | Freed | Refused
