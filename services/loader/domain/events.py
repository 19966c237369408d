"""Events of the loader. The effects of decisions: `domain/effects.py`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from services.loader.domain.state import Until
from shared.contracts.base import ErrorBody
from shared.contracts.models import ModelCard
from shared.contracts.stages import LayerRange, RankOf


@dataclass(frozen=True)
class Prepare:
    reply: int
    instance_id: str
    card: ModelCard
    token: int
    traceparent: str | None = None
    background: bool = False
    device: str | None = None
    layers: LayerRange | None = None
    rank: RankOf | None = None


@dataclass(frozen=True)
class Attach:
    """An instance or a connection requests weights.

    Attributes:
        background: True for a background load; None keeps the priority of the holder's prepare.
        local: The holder is a connection, which the nodeagent does not know.
        device: The device that weights can be copied to; None: none.
        layers: Only what a stage with these layers needs; None: all weights.
        rank: Only what this rank of a tensor-parallel group needs; None: whole tensors.
    """

    reply: int
    instance_id: str
    card: ModelCard
    until: Until
    traceparent: str | None = None
    local: bool = False
    background: bool | None = None
    device: str | None = None
    layers: LayerRange | None = None
    rank: RankOf | None = None


@dataclass(frozen=True)
class Release:
    """A holder releases its weights.

    Attributes:
        keep: They may stay cached without a holder.
    """

    reply: int
    instance_id: str
    keep: bool = True


@dataclass(frozen=True)
class Abandoned:
    """The request `reply` ended without an answer: its deadline has passed."""

    reply: int


@dataclass(frozen=True)
class NodeReported:
    """A status of this node's nodeagent, which lists `instances`."""

    instances: frozenset[str]


@dataclass(frozen=True)
class Fetched:
    """The remote source has sent `fetched` bytes so far."""

    weights_id: str
    run: int
    fetched: int


@dataclass(frozen=True)
class LaidOut:
    """The run has its layout, and waits for `Grant` or `Deny`.

    It needs this many bytes of chunks. `room` is the free memory in bytes.

    Attributes:
        lacking: Bytes to read where a separate device has some of the units, by device.
    """

    weights_id: str
    run: int
    total_bytes: int
    room: int
    lacking: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Indexed:
    """Header and index of the segment are written to its chunks."""

    weights_id: str
    run: int
    directory: str
    total_bytes: int


@dataclass(frozen=True)
class Progressed:
    """Every byte of the segment below `loaded` is loaded.

    Attributes:
        arrived: Bytes loaded in any order, those above `loaded` included.
    """

    weights_id: str
    run: int
    loaded: int
    arrived: int = 0


@dataclass(frozen=True)
class Completed:
    """The run has ended, and every byte is where it was wanted.

    Attributes:
        kept_bytes: Bytes that are left in host memory; None: all.
    """

    weights_id: str
    run: int
    kept_bytes: int | None = None


@dataclass(frozen=True)
class Failed:
    """The run ended with an error and writes no more."""

    weights_id: str
    run: int
    error: ErrorBody


@dataclass(frozen=True)
class Ended:
    """The cancelled run writes no more."""

    weights_id: str
    run: int


@dataclass(frozen=True)
class Reclaimed:
    """The memory of weights was reclaimed.

    Attributes:
        freed: Bytes proved free; 0 while a process still maps them.
        kept: Bytes that stay spare.
        on_devices: Bytes released on devices.
    """

    weights_id: str
    run: int
    freed: int
    kept: int = 0
    on_devices: int = 0


@dataclass(frozen=True)
class CopiedToDevice:
    """Every byte is in the arena, or (`failed`) never will be."""

    weights_id: str
    number: int
    failed: bool = False


@dataclass(frozen=True)
class ArenaClosed:
    """The arena's memory, `freed` bytes, is released."""

    number: int
    freed: int


@dataclass(frozen=True)
class Vacated:
    """No process maps the chunks of a `Vacate`, and those not kept have no memory.

    Attributes:
        room: Bytes of free memory.
        kept: Chunks populated, if memory did not suffice for all.
    """

    run: int
    room: int
    kept: int | None = None


@dataclass(frozen=True)
class VacateFailed:
    """The chunks of a `Vacate` could not be freed, and stay unused.

    Attributes:
        room: Bytes of free memory.
    """

    run: int
    room: int


@dataclass(frozen=True)
class Adopt:
    """Complete weights of an earlier loader, checked at the start.

    Without holders they are cached.
    """

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
    """All weights of the earlier loader were adopted.

    Attributes:
        mapped: Chunks without an owner that a process maps; unusable until it exits.
        ready: Chunks to keep populated when the loader is idle.
        room: Bytes of free memory.
    """

    mapped: tuple[int, ...] = ()
    ready: int = 0
    room: int = 0


@dataclass(frozen=True)
class Idle:
    """No load was in progress for a while.

    Attributes:
        room: Bytes of free memory.
    """

    room: int


@dataclass(frozen=True)
class MemoryPressure:
    """The host is short of `nbytes` of memory."""

    nbytes: int


@dataclass(frozen=True)
class Stop:
    """The process shuts down: cancel loads, keep complete weights that are held."""


Event = (
    Prepare | Attach | Release | Abandoned | NodeReported | Fetched | LaidOut | Indexed | Progressed | Completed | Failed | Ended | Reclaimed
    | Vacated | VacateFailed | CopiedToDevice | ArenaClosed | Adopt | Adopted | Idle | MemoryPressure | Stop
)  # fmt: skip
