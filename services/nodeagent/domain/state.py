"""The state that a nodeagent's loop owns. Times are seconds of the machine's monotonic clock, which outlives the agent's process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

from services.nodeagent.domain.memory import Ledger
from services.nodeagent.domain.reservations import Reservation
from shared.contracts.base import ErrorBody, Frozen
from shared.contracts.engine import EngineLoad
from shared.contracts.node import InstanceState, StartInstance, SuspendInstance, SuspendWay
from shared.contracts.phases import Phase

EPOCH_SHIFT = 32
RELEASE_RETRY_S = 1.0
STRAY_HOLDER_S = 30.0
"""The loader and this node hear of a start at the same time; one that holds weights this long and was never started here was refused."""


class Process(StrEnum):
    """`QUEUED`: none yet, its reservation waits for bytes."""

    QUEUED = "queued"
    FORKING = "forking"
    ALIVE = "alive"
    GONE = "gone"


class Lap(Frozen):
    """A start, suspension or resumption that is over: when, and how long it took, in seconds."""

    at: float
    took_s: float


class Outlook(Frozen):
    """What a suspension of an instance would do, as far as its node can say now. `way` None: it is not possible, for `reason`.

    `left_bytes` would stay in use, `snapshot_bytes` be charged to the snapshot budget, and the way back take `resume_s`. As expected from
    outside, until a first round has measured it.
    """

    way: SuspendWay | None = None
    reason: str = ""
    left_bytes: int = 0
    snapshot_bytes: int = 0
    resume_s: float = 0.0

    @property
    def looked(self) -> bool:
        """Whether anybody has looked: an engine is not asked about before it is ready."""
        return self.way is not None or bool(self.reason)


class Parking(Frozen):
    """What is known of an instance's suspensions. `used_bytes`: of its device, when last looked at; `base_bytes`: after its start, which a
    leak is told by.

    `holding`: it takes no new request, and is to be frozen once idle. `freezing`: it is being frozen, or was; recorded before it is.
    `no_room`: its last resumption waited for bytes in vain.
    """

    outlook: Outlook = Outlook()
    holding: bool = False
    freezing: bool = False
    wake_asked: bool = False
    frees_bytes: int = 0
    left_bytes: int = 0
    snapshot_bytes: int = 0
    spilled: Literal["", "writing", "written", "refused"] = ""
    need_bytes: int = 0
    used_bytes: int = 0
    base_bytes: int = 0
    resumes: int = 0
    begun_at: float = 0.0
    started: Lap | None = None
    suspended: Lap | None = None
    resumed: Lap | None = None
    resume_s: float | None = None
    fell_back: ErrorBody | None = None
    no_room: ErrorBody | None = None


class Instance(Frozen):
    """One instance as this agent knows it; also what its record on disk holds."""

    command: StartInstance
    token: int
    state: InstanceState = InstanceState.PREPARING
    process: Process = Process.FORKING
    pid: int | None = None
    process_start: int | None = None
    stop_asked: bool = False
    heard: bool = False
    heard_early: bool = False
    phase: Phase | None = None
    progress: float = 0.0
    loaded_bytes: int = 0
    load: EngineLoad = EngineLoad()
    weights_id: str | None = None
    error: ErrorBody | None = None
    progress_at: float
    adopt_until: float | None = None
    drain_until: float | None = None
    kill_at: float | None = None
    release_at: float | None = None
    weights_freed: int | None = None
    memory_freed: int | None = None
    ended_at: float | None = None
    engine_pids: tuple[int, ...] = ()
    sleep_levels: tuple[int, ...] = ()
    parking: Parking = Parking()
    booked: bool = True

    @property
    def instance_id(self) -> str:
        return self.command.instance_id

    @property
    def freed_bytes(self) -> int | None:
        """What the end of this instance freed, once all of it is proved."""
        if self.weights_freed is None or self.memory_freed is None:
            return None
        return self.weights_freed + self.memory_freed


@dataclass(frozen=True)
class Policy:
    """`kill_grace_s`: from SIGTERM to SIGKILL. `adopt_s`: for an engine to answer a new agent. `keep_ended_s`: in the status."""

    kill_grace_s: float = 5.0
    adopt_s: float = 10.0
    keep_ended_s: float = 60.0


@dataclass(frozen=True)
class IdleAsk:
    """A stop or a suspension `only_if_idle` that waits for the engine's answer."""

    reply: int
    drain_timeout_s: float


@dataclass(frozen=True)
class EarlyAsk:
    """A suspension of an instance that nobody has looked at yet: carried out, or turned into a stop, once somebody has."""

    command: SuspendInstance
    reply: int


@dataclass(frozen=True)
class NodeState:
    ledger: Ledger
    policy: Policy = Policy()
    instances: Mapping[str, Instance] = field(default_factory=dict)
    idle_asks: Mapping[str, tuple[IdleAsk, ...]] = field(default_factory=dict)
    hold_asks: Mapping[str, tuple[IdleAsk, ...]] = field(default_factory=dict)
    early_asks: Mapping[str, tuple[EarlyAsk, ...]] = field(default_factory=dict)
    strays: Mapping[str, float] = field(default_factory=dict)
    newest_epoch: int = 0
    stopping: bool = False
    queue: tuple[Reservation, ...] = ()
    snapshot_budget: int = 0
    spills: bool = False
    """Snapshots in host memory can be written to swap here."""

    @property
    def snapshot_bytes(self) -> int:
        """Host memory and swap that suspended instances take, and those that are being suspended will."""
        return sum(i.parking.snapshot_bytes for i in self.instances.values() if i.process is Process.ALIVE)

    def snapshots_kept(self, but: str) -> int:
        """Of those that are not being stopped or written to swap, and not of `but`: what the budget has to hold."""
        kept = (i for i in self.instances.values() if i.process is Process.ALIVE and not i.stop_asked and i.instance_id != but)
        return sum(i.parking.snapshot_bytes for i in kept if i.parking.spilled != "writing")

    def live(self) -> tuple[Instance, ...]:
        """Instances that still hold something."""
        return tuple(i for i in self.instances.values() if i.ended_at is None)


def deadlines(state: NodeState) -> list[float]:
    """When a `Tick` will have something to do."""
    found = [r.until for r in state.queue]
    for i in state.instances.values():
        found += [t for t in (i.adopt_until, i.drain_until, i.kill_at, i.release_at) if t is not None]
        if i.state.starting and i.process is not Process.QUEUED:
            found.append(i.progress_at + i.command.card.spec.init_timeout)
        if i.ended_at is not None:
            found.append(i.ended_at + state.policy.keep_ended_s)
    return found
