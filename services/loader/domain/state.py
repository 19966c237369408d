"""The state of the loader: immutable values, changed by `decide` alone.

An entry's stages:

    LOADING ──► INDEXED ──► COMPLETE ◄──► CACHED ──► gone
                    (a load run is in progress in LOADING and INDEXED)
       │           │           │
       ├───────────┴──► FAILED │              kept while it has holders, so that they get the error
       ▼           ▼           ▼
      LEAVING (the run is being cancelled, or the memory reclaimed) ──► gone, or LOADING again
               after a new attach
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

from shared.contracts.base import ErrorBody
from shared.contracts.models import ModelCard
from shared.contracts.stages import LayerRange, RankOf
from weights.pool.chunks import Chunks

Until = Literal["index", "complete"]


class Stage(StrEnum):
    LOADING = "loading"
    INDEXED = "indexed"
    COMPLETE = "complete"
    CACHED = "cached"
    FAILED = "failed"
    LEAVING = "leaving"


@dataclass(frozen=True)
class Holder:
    """An instance or a connection that uses an entry's weights.

    Attributes:
        since: Monotonic seconds of the last prepare or attach.
        missing: Monotonic seconds since when no status of the nodeagent lists it; None while it is
            listed.
        local: A connection, which the nodeagent does not know.
        background: No request waits for it.
    """

    since: float
    missing: float | None = None
    local: bool = False
    background: bool = False
    device: str | None = None
    """The device that it computes on, if weights are copied there; None: it reads host memory."""


class OnDevice(StrEnum):
    COMING = "coming"
    THERE = "there"
    FAILED = "failed"
    """No memory there, or the device failed: its holders get no handle, and copy by themselves."""


@dataclass(frozen=True)
class Arena:
    """An entry's memory on one device.

    Attributes:
        number: Its identifier outside the domain.
    """

    number: int
    stage: OnDevice = OnDevice.COMING


@dataclass(frozen=True)
class Closing:
    """An arena without holders, being released.

    Attributes:
        replies: Releases to answer then, with the bytes that stay cached.
    """

    released_by: str
    replies: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Waiter:
    """An attach without an answer yet.

    Attributes:
        reply: The request's identifier outside the domain.
    """

    reply: int
    instance_id: str
    until: Until


@dataclass(frozen=True)
class Wanted:
    """Parameters of a load run."""

    card: ModelCard
    traceparent: str | None = None
    background: bool = False
    layers: LayerRange | None = None
    rank: RankOf | None = None


@dataclass(frozen=True)
class Entry:
    """The weights of one model revision on this node, or the part that a stage or a rank needs.

    Attributes:
        run: Number of the load run; reports of earlier runs are stale.
        wants: Bytes of chunks that the run waits for.
        arrived_bytes: Bytes loaded in any order, those above the watermark `loaded_bytes` included.
        used_at: Monotonic seconds of the last attach or release.
    """

    weights_id: str
    model: str
    run: int
    stage: Stage = Stage.LOADING
    wants: int = 0
    directory: str = ""
    total_bytes: int = 0
    loaded_bytes: int = 0
    arrived_bytes: int = 0
    fetched_bytes: int = 0
    holders: Mapping[str, Holder] = field(default_factory=dict)
    waiters: tuple[Waiter, ...] = ()
    error: ErrorBody | None = None
    source: str = ""
    pinned: bool = False
    used_at: float = 0.0
    releases: tuple[int, ...] = ()
    """Release requests to answer when the memory is free (LEAVING)."""
    released_by: frozenset[str] = frozenset()
    """Instances whose release evicted it: their repeated releases wait as well."""
    again: Wanted | None = None
    """Load it again after the eviction."""
    arenas: Mapping[str, Arena] = field(default_factory=dict)
    """By device."""
    device: str | None = None
    """The separate device that alone has the bytes (ADR 0058).

    Host memory has the head, and during the load what the device lacked. Readers of host memory and
    other devices load the same weights as an entry of their own.
    """

    @property
    def key(self) -> str:
        """The entry's key in the state."""
        return self.weights_id if self.device is None else f"{self.weights_id}@{self.device}#{self.run}"


@dataclass(frozen=True)
class State:
    """All entries, by their keys.

    Attributes:
        released: The latest instances that released; their late prepares and attaches are refused.
    """

    entries: Mapping[str, Entry] = field(default_factory=dict)
    runs: int = 0
    epoch: int = 0
    released: tuple[str, ...] = ()
    closing: bool = False
    ready: int = 0
    """Chunks to keep populated, when there is time and memory for it."""
    chunks: Chunks = field(default_factory=Chunks)
    arenas: int = 0
    """Number of arenas opened so far."""
    closing_arenas: Mapping[int, Closing] = field(default_factory=dict)

    @property
    def settled(self) -> bool:
        """True if no run and no eviction is in progress."""
        return all(e.stage in (Stage.COMPLETE, Stage.CACHED, Stage.FAILED) for e in self.entries.values())

    @property
    def is_loading(self) -> bool:
        return any(e.stage in (Stage.LOADING, Stage.INDEXED) for e in self.entries.values())

    def of_run(self, run: int) -> Entry | None:
        return next((e for e in self.entries.values() if e.run == run), None)

    def held_by(self, instance_id: str) -> Entry | None:
        return next((e for e in self.entries.values() if instance_id in e.holders), None)
