"""What the loader knows: values only, changed by `decide` alone.

An entry's stages:

    LOADING ──► INDEXED ──► COMPLETE ◄──► CACHED ──► gone        a load run is under way in LOADING and INDEXED
       │           │           │
       ├───────────┴──► FAILED │              kept while it has holders, so that they are told why
       ▼           ▼           ▼
      LEAVING (the run is being called off, or the memory given back) ──► gone, or LOADING again if somebody came meanwhile
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

from shared.contracts.base import ErrorBody
from shared.contracts.models import ModelCard
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
    """`since`: monotonic seconds of the last prepare or attach. `missing`: of the first of the nodeagent's latest statuses that all did
    not list it; None while it is listed. `local`: a connection, which the nodeagent does not know. `background`: no request waits."""

    since: float
    missing: float | None = None
    local: bool = False
    background: bool = False
    device: str | None = None
    """Which it computes on, where weights are brought there; None: it takes them from host memory."""


class OnDevice(StrEnum):
    COMING = "coming"
    THERE = "there"
    FAILED = "failed"
    """No room there, or the device failed: its holders are told of no arena, and copy for themselves."""


@dataclass(frozen=True)
class Arena:
    """An entry's memory on one device. `number` names it to the shell."""

    number: int
    stage: OnDevice = OnDevice.COMING


@dataclass(frozen=True)
class Closing:
    """An arena without holders, being given back. `replies`: releases answered then, with the bytes that stay cached."""

    released_by: str
    replies: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Waiter:
    """An attach that is not answered yet. `reply` names the request to the shell."""

    reply: int
    instance_id: str
    until: Until


@dataclass(frozen=True)
class Wanted:
    """What a load run needs to begin."""

    card: ModelCard
    traceparent: str | None = None
    background: bool = False


@dataclass(frozen=True)
class Entry:
    """The weights of one model revision on this node. `run` numbers the load run: reports of earlier runs are stale. `wants`: bytes of
    chunks that the run waits for. `used_at`: monotonic seconds of the last attach or release."""

    weights_id: str
    model: str
    run: int
    stage: Stage = Stage.LOADING
    wants: int = 0
    directory: str = ""
    total_bytes: int = 0
    loaded_bytes: int = 0
    fetched_bytes: int = 0
    holders: Mapping[str, Holder] = field(default_factory=dict)
    waiters: tuple[Waiter, ...] = ()
    error: ErrorBody | None = None
    source: str = ""
    pinned: bool = False
    used_at: float = 0.0
    releases: tuple[int, ...] = ()
    """Release requests answered when the memory is gone (LEAVING)."""
    released_by: frozenset[str] = frozenset()
    """Whose release made it leave: a repeated one waits as well."""
    again: Wanted | None = None
    """Load once more as soon as it has left."""
    arenas: Mapping[str, Arena] = field(default_factory=dict)
    """By device."""


@dataclass(frozen=True)
class State:
    """All entries by weights id. `released`: the latest instances that let go; a late prepare or attach of theirs is refused."""

    entries: Mapping[str, Entry] = field(default_factory=dict)
    runs: int = 0
    epoch: int = 0
    released: tuple[str, ...] = ()
    closing: bool = False
    ready: int = 0
    """Chunks that are to be spare whenever there is time and memory for it."""
    chunks: Chunks = field(default_factory=Chunks)
    arenas: int = 0
    """How many were opened so far."""
    closing_arenas: Mapping[int, Closing] = field(default_factory=dict)

    @property
    def settled(self) -> bool:
        """No run and no removal is under way."""
        return all(e.stage in (Stage.COMPLETE, Stage.CACHED, Stage.FAILED) for e in self.entries.values())

    @property
    def is_loading(self) -> bool:
        return any(e.stage in (Stage.LOADING, Stage.INDEXED) for e in self.entries.values())

    def held_by(self, instance_id: str) -> Entry | None:
        return next((e for e in self.entries.values() if instance_id in e.holders), None)
