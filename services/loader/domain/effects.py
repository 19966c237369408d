"""What the loader wants done: the shell performs it, and answers with events."""

from __future__ import annotations

from dataclasses import dataclass, field

from shared.contracts.base import ErrorBody
from shared.contracts.models import ModelCard


@dataclass(frozen=True)
class StartRun:
    weights_id: str
    run: int
    card: ModelCard
    traceparent: str | None = None
    background: bool = False


@dataclass(frozen=True)
class CancelRun:
    """Call the run off; `Ended` (or `Completed`, if it was too late) follows."""

    weights_id: str
    run: int


@dataclass(frozen=True)
class Hurry:
    """A request waits for this run now."""

    run: int


@dataclass(frozen=True)
class Grant:
    run: int
    chunks: tuple[int, ...]


@dataclass(frozen=True)
class Deny:
    """There is no room for what the run wants; `Failed` follows."""

    run: int


@dataclass(frozen=True)
class Vacate:
    """Prove that no process maps these chunks, then give back the memory of all but the first `keep`; `Vacated` follows when that is so.
    With `weights_id`, `Left` follows within a bounded time. With `nbytes` 0 the chunks have no memory yet, and those kept are to get it."""

    run: int
    chunks: tuple[int, ...]
    nbytes: int
    keep: int
    weights_id: str | None = None


@dataclass(frozen=True)
class OpenArena:
    """Bring the run's bytes to `device` as they come, those in `chunks` that are there already first; `Brought` follows."""

    weights_id: str
    run: int
    number: int
    device: str
    chunks: tuple[int, ...]
    total_bytes: int
    background: bool = False


@dataclass(frozen=True)
class CloseArena:
    """Call the arena's copies off and give its memory back; `ArenaClosed` follows."""

    number: int


@dataclass(frozen=True)
class Remember:
    """Write down where complete weights lie and who holds them."""

    weights_id: str


@dataclass(frozen=True)
class Forget:
    """Remove that record, before anything happens to the memory."""

    weights_id: str


@dataclass(frozen=True)
class Accepted:
    reply: int


@dataclass(frozen=True)
class Attached:
    reply: int
    weights_id: str
    device: str | None = None


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
    StartRun | CancelRun | Hurry | Grant | Deny | Vacate | OpenArena | CloseArena | Remember | Forget | Accepted | Attached | Freed | Refused
)  # fmt: skip
