"""What may happen to the loader. What it wants done then: `domain/effects.py`."""

from __future__ import annotations

from dataclasses import dataclass

from services.loader.domain.state import Until
from shared.contracts.base import ErrorBody
from shared.contracts.models import ModelCard


@dataclass(frozen=True)
class Prepare:
    reply: int
    instance_id: str
    card: ModelCard
    token: int
    traceparent: str | None = None
    background: bool = False
    device: str | None = None


@dataclass(frozen=True)
class Attach:
    """`local`: the holder is a connection; the nodeagent does not know it. `background`: None: as the holder's prepare said. `device`: one
    that weights can be brought to."""

    reply: int
    instance_id: str
    card: ModelCard
    until: Until
    traceparent: str | None = None
    local: bool = False
    background: bool | None = None
    device: str | None = None


@dataclass(frozen=True)
class Release:
    """`keep`: what nobody holds any more may stay cached in memory."""

    reply: int
    instance_id: str
    keep: bool = True


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
class Laid:
    """The run knows how many bytes of chunks it needs, and waits for `Grant` or `Deny`. `room`: bytes of memory free just now."""

    weights_id: str
    run: int
    total_bytes: int
    room: int


@dataclass(frozen=True)
class Indexed:
    """Header and index of the segment are in its chunks."""

    weights_id: str
    run: int
    directory: str
    total_bytes: int


@dataclass(frozen=True)
class Progressed:
    """Every byte of the segment below `loaded` is there."""

    weights_id: str
    run: int
    loaded: int


@dataclass(frozen=True)
class Completed:
    weights_id: str
    run: int


@dataclass(frozen=True)
class Failed:
    """The run has ended in an error, and writes no more."""

    weights_id: str
    run: int
    error: ErrorBody


@dataclass(frozen=True)
class Ended:
    """A run that was called off writes no more."""

    weights_id: str
    run: int


@dataclass(frozen=True)
class Left:
    """Weights are gone: `freed` bytes are proved to be free (0: somebody maps them still), `kept` bytes stay spare, `on_devices` were given
    back there."""

    weights_id: str
    run: int
    freed: int
    kept: int = 0
    on_devices: int = 0


@dataclass(frozen=True)
class Brought:
    """Every byte is in the arena, or (`failed`) will never be."""

    weights_id: str
    number: int
    failed: bool = False


@dataclass(frozen=True)
class ArenaClosed:
    """The arena's memory, `freed` bytes, is the device's again."""

    number: int
    freed: int


@dataclass(frozen=True)
class Vacated:
    """Nobody maps the chunks that `Vacate` named, and those not kept have no memory. `room`: bytes of memory free just now. `kept`: how many
    were, if there was not memory for all that were to be."""

    run: int
    room: int
    kept: int | None = None


@dataclass(frozen=True)
class Adopt:
    """Complete weights of an earlier loader process, found and checked at the start; without holders they are cached."""

    weights_id: str
    model: str
    chunks: tuple[int, ...]
    directory: str
    total_bytes: int
    holders: tuple[str, ...]
    source: str = ""
    pinned: bool = False


@dataclass(frozen=True)
class Adopted:
    """All that was found is told. `mapped`: chunks that nobody owns and some process maps: not to be given away before it ends. `ready`: how
    many chunks are to have memory whenever there is time; `room`: bytes of memory free just now."""

    mapped: tuple[int, ...] = ()
    ready: int = 0
    room: int = 0


@dataclass(frozen=True)
class Quiet:
    """Nothing has been loaded for a while. `room`: bytes of memory free just now."""

    room: int


@dataclass(frozen=True)
class Pressed:
    """The host is short of `nbytes` of memory."""

    nbytes: int


@dataclass(frozen=True)
class Stop:
    """The process is to end: finish nothing, keep what is complete and held."""


Event = (
    Prepare | Attach | Release | Abandoned | NodeHeard | Fetched | Laid | Indexed | Progressed | Completed | Failed | Ended | Left
    | Vacated | Brought | ArenaClosed | Adopt | Adopted | Quiet | Pressed | Stop
)  # fmt: skip
