"""Effects of decisions: the shell performs them and answers with events."""

from __future__ import annotations

from dataclasses import dataclass, field

from shared.contracts.base import ErrorBody
from shared.contracts.models import ModelCard
from shared.contracts.stages import LayerRange, RankOf


@dataclass(frozen=True)
class StartRun:
    weights_id: str
    run: int
    card: ModelCard
    traceparent: str | None = None
    background: bool = False
    layers: LayerRange | None = None
    rank: RankOf | None = None

    @property
    def is_part(self) -> bool:
        """True if only a part of the model's weights is wanted."""
        return self.layers is not None or self.rank is not None


@dataclass(frozen=True)
class CancelRun:
    """Cancel the run; `Ended` follows, or `Completed` if it was too late."""

    weights_id: str
    run: int


@dataclass(frozen=True)
class RaisePriority:
    """Give the run a request's priority: one waits for it now."""

    run: int


@dataclass(frozen=True)
class Grant:
    """Give a run its chunks.

    Attributes:
        device: The run reads what this device lacks, and gives its memory back after the copy.
            None: it reads all bytes.
    """

    run: int
    chunks: tuple[int, ...]
    device: str | None = None


@dataclass(frozen=True)
class Deny:
    """Refuse memory to the run; `Failed` follows."""

    run: int


@dataclass(frozen=True)
class Vacate:
    """Reclaim the memory of all but the first `keep` chunks when no process maps them.

    `Vacated` follows. With `weights_id`, `Reclaimed` follows within a bounded time. With `nbytes` 0
    the chunks have no memory, and the first `keep` get it.
    """

    run: int
    chunks: tuple[int, ...]
    nbytes: int
    keep: int
    weights_id: str | None = None


@dataclass(frozen=True)
class OpenArena:
    """Copy the run's bytes to `device` as they are loaded, those loaded already first.

    `CopiedToDevice` follows.

    Attributes:
        opened_for: The holders that wait for it, without later ones.
    """

    weights_id: str
    run: int
    number: int
    device: str
    chunks: tuple[int, ...]
    total_bytes: int
    background: bool = False
    model: str = ""
    source: str = ""
    pinned: bool = False
    opened_for: frozenset[str] = field(default=frozenset(), compare=False)


@dataclass(frozen=True)
class CloseArena:
    """Cancel the arena's copies and release its memory; `ArenaClosed` follows."""

    number: int


@dataclass(frozen=True)
class WriteRecord:
    """Write the record of complete weights: their chunks and holders."""

    key: str


@dataclass(frozen=True)
class RemoveRecord:
    """Remove that record, before the memory changes."""

    weights_id: str


@dataclass(frozen=True)
class Accepted:
    reply: int


@dataclass(frozen=True)
class Attached:
    reply: int
    key: str
    device: str | None = None
    instance_id: str = field(default="", compare=False)


@dataclass(frozen=True)
class Freed:
    reply: int
    freed: int
    cached: int = 0
    on_devices: int = 0


@dataclass(frozen=True)
class Refused:
    reply: int
    error: ErrorBody = field(repr=False)


Effect = (
    StartRun | CancelRun | RaisePriority | Grant | Deny | Vacate | OpenArena | CloseArena | WriteRecord | RemoveRecord
    | Accepted | Attached | Freed | Refused
)  # fmt: skip
