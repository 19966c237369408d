"""The state that a nodeagent's loop owns.

Times are seconds of the machine's monotonic clock, which outlives the process.

Fields of `Instance` and `SuspendState` are stored on disk; aliases read the records of earlier
versions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

from pydantic import AliasChoices, Field

from services.nodeagent.domain.late_binding import Binding, StartTimes, Traffic
from services.nodeagent.domain.memory import Ledger
from services.nodeagent.domain.reservations import Reservation
from shared.contracts.base import ErrorBody, Frozen
from shared.contracts.engine import EngineLoad
from shared.contracts.node import EndedEngine, InstanceState, StartInstance, SuspendInstance, SuspendWay
from shared.contracts.phases import Phase

EPOCH_SHIFT = 32
RELEASE_RETRY_S = 1.0
STRAY_HOLDER_S = 30.0
"""Weights held this long for an instance that was never started here belong to a refused start.

The loader and the node receive a start at the same time.
"""


class Process(StrEnum):
    """State of the engine's process.

    `QUEUED`: there is none, the reservation waits for memory.
    """

    QUEUED = "queued"
    FORKING = "forking"
    ALIVE = "alive"
    GONE = "gone"


class TimedStep(Frozen):
    """A finished start, suspension or resume: its end and duration in seconds."""

    at: float
    took_s: float


class Outlook(Frozen):
    """The expected effect of suspending an instance.

    `way` None: it is impossible, for `reason`.

    The numbers are estimates until the first suspension has measured them.

    Args:
        left_bytes: Device memory that stays in use.
        snapshot_bytes: Charged to the snapshot budget.
        resume_s: Duration of a resume.
        moves_to: Other devices of the node that a snapshot could be restored onto.
    """

    way: SuspendWay | None = None
    reason: str = ""
    left_bytes: int = 0
    snapshot_bytes: int = 0
    resume_s: float = 0.0
    moves_to: tuple[str, ...] = ()

    @property
    def is_assessed(self) -> bool:
        """True if the engine has been assessed, which happens once it is ready."""
        return self.way is not None or bool(self.reason)


class SuspendState(Frozen):
    """The measurements of an instance's suspensions.

    Args:
        pause_asked: The engine was asked to pause if it is idle, and may be paused until it has
            answered, or serves again. Set beforehand.
        pausing: The engine accepts no new request, and is frozen once idle.
        freezing: True while the instance is being frozen, or is frozen; set beforehand.
        resume_requested: A resume command arrived while it was being frozen.
        frees_bytes: Device memory that the last suspension freed.
        left_bytes: Device memory that stayed in use.
        spilled: Progress of writing the snapshot to swap.
        spilled_bytes: Bytes of the snapshot that were written to swap.
        need_bytes: Device memory to reserve for a resume.
        used_bytes: Device memory at the last assessment.
        base_bytes: Device memory after the start; growth beyond it is a leak.
        resumes: Number of resumes.
        fell_back: Error of the resume that led to a cold start.
        no_memory_error: The last resume waited in vain for memory.
        moved_from: The devices of the snapshot, while it is restored onto others.
    """

    outlook: Outlook = Outlook()
    pause_asked: bool = False
    pausing: bool = Field(default=False, validation_alias=AliasChoices("pausing", "holding"))
    freezing: bool = False
    resume_requested: bool = Field(default=False, validation_alias=AliasChoices("resume_requested", "wake_asked"))
    frees_bytes: int = 0
    left_bytes: int = 0
    snapshot_bytes: int = 0
    spilled: Literal["", "writing", "written", "refused"] = ""
    spilled_bytes: int = 0
    need_bytes: int = 0
    used_bytes: int = 0
    base_bytes: int = 0
    resumes: int = 0
    begun_at: float = 0.0
    started: TimedStep | None = None
    suspended: TimedStep | None = None
    resumed: TimedStep | None = None
    resume_s: float | None = None
    fell_back: ErrorBody | None = None
    no_memory_error: ErrorBody | None = Field(default=None, validation_alias=AliasChoices("no_memory_error", "no_room"))
    moved_from: tuple[str, ...] = ()


class Instance(Frozen):
    """One instance as this agent knows it; also the content of its record on disk."""

    command: StartInstance
    token: int
    state: InstanceState = InstanceState.PREPARING
    process: Process = Process.FORKING
    pid: int | None = None
    process_start: int | None = None
    stop_asked: bool = False
    has_reported: bool = Field(default=False, validation_alias=AliasChoices("has_reported", "heard"))
    reported_early: bool = Field(default=False, validation_alias=AliasChoices("reported_early", "heard_early"))
    phase: Phase | None = None
    progress: float = 0.0
    loaded_bytes: int = 0
    load: EngineLoad = EngineLoad()
    weights_id: str | None = None
    accepts_requests: bool = False
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
    suspend_state: SuspendState = Field(default=SuspendState(), validation_alias=AliasChoices("suspend_state", "parking"))
    booked: bool = True
    taken_from: str | None = None
    """The suspended instance whose engine, and process, this one took."""
    is_shared: bool = False
    """True if the instance is in its device's executor: `pid` is that of the executor."""
    binding: Binding | None = None
    """How this agent chose its device; None: the scheduler did."""

    @property
    def instance_id(self) -> str:
        return self.command.instance_id

    @property
    def awaits_progress(self) -> bool:
        """True while the start must make progress; not once the process is being ended."""
        return self.state.starting and self.process is not Process.QUEUED and self.kill_at is None

    @property
    def suspends_until(self) -> float | None:
        """When a suspension in progress is given up: a driver may hang. None: there is none."""
        if not self.suspend_state.freezing or self.state is not InstanceState.DRAINING or self.stop_asked:
            return None
        return self.suspend_state.begun_at + self.command.card.spec.init_timeout

    @property
    def freed_bytes(self) -> int | None:
        """Bytes that the end of this instance freed, once verified."""
        if self.weights_freed is None or self.memory_freed is None:
            return None
        return self.weights_freed + self.memory_freed


@dataclass(frozen=True)
class Policy:
    """Timeouts of the node.

    Args:
        kill_grace_s: Seconds from SIGTERM to SIGKILL.
        adopt_s: Seconds that an engine has to report to a new agent.
        keep_failed_s: Seconds that a failed instance stays in the status, for its error.
        keep_stopped_s: Seconds that a stopped one stays there. Several whole statuses show it, and
            a receiver that misses them all sees that it is gone.
    """

    kill_grace_s: float = 5.0
    adopt_s: float = 20.0
    keep_failed_s: float = 60.0
    keep_stopped_s: float = 4.0


@dataclass(frozen=True)
class IdleWaiter:
    """A stop or suspension with `only_if_idle` that waits for the engine's answer."""

    reply: int
    drain_timeout_s: float


@dataclass(frozen=True)
class DeferredSuspend:
    """A suspension of an instance that is not assessed yet; decided once it is."""

    command: SuspendInstance
    reply: int


@dataclass(frozen=True, slots=True)
class Ended:
    """An engine that has ended.

    Attributes:
        at: When its process was found ended, in seconds of the monotonic clock.
    """

    at: float
    engine: EndedEngine


@dataclass(frozen=True)
class NodeState:
    ledger: Ledger
    policy: Policy = Policy()
    instances: Mapping[str, Instance] = field(default_factory=dict)
    idle_waiters: Mapping[str, tuple[IdleWaiter, ...]] = field(default_factory=dict)
    pause_waiters: Mapping[str, tuple[IdleWaiter, ...]] = field(default_factory=dict)
    deferred_suspends: Mapping[str, tuple[DeferredSuspend, ...]] = field(default_factory=dict)
    stray_holders: Mapping[str, float] = field(default_factory=dict)
    newest_epoch: int = 0
    stopping: bool = False
    queue: tuple[Reservation, ...] = ()
    snapshot_budget: int = 0
    templates: int = 0
    """Limit of suspended engines that the node offers to other models of their template key."""
    crashes: Mapping[str, int] = field(default_factory=dict)
    """Number of crashes of an executor while it computed for a model, by model."""
    traffic: Traffic = Traffic()
    """The latest report of the loader's links and of whole weights on devices."""
    start_times: Mapping[str, StartTimes] = field(default_factory=dict)
    """Times of attaches with and without loads beside them, by model."""
    ended_engines: tuple[Ended, ...] = ()
    spills: bool = False
    """True if snapshots in host memory can be written to swap."""

    @property
    def snapshot_bytes(self) -> int:
        """Host memory and swap of suspended instances and of those being suspended."""
        return sum(i.suspend_state.snapshot_bytes for i in self.instances.values() if i.process is Process.ALIVE)

    def snapshot_bytes_except(self, but: str) -> int:
        """Snapshot bytes that the budget has to hold.

        Instances that are being stopped or spilled, and the instance `but`, are left out.
        """
        kept = (i for i in self.instances.values() if i.process is Process.ALIVE and not i.stop_asked and i.instance_id != but)
        return sum(i.suspend_state.snapshot_bytes for i in kept if i.suspend_state.spilled != "writing")

    def list_live(self) -> tuple[Instance, ...]:
        """Instances that still hold resources."""
        return tuple(i for i in self.instances.values() if i.ended_at is None)


def deadlines(state: NodeState) -> list[float]:
    """The times at which a `Tick` has work to do."""
    found = [r.until for r in state.queue]
    for i in state.instances.values():
        found += [t for t in (i.adopt_until, i.drain_until, i.kill_at, i.release_at, i.suspends_until) if t is not None]
        if i.awaits_progress:
            found.append(i.progress_at + i.command.card.spec.init_timeout)
        if i.ended_at is not None:
            found.append(forget_at(state, i))
    return found


def forget_at(state: NodeState, ended: Instance) -> float:
    """Return when an ended instance leaves the status."""
    assert ended.ended_at is not None
    has_failed = ended.state is InstanceState.FAILED
    return ended.ended_at + (state.policy.keep_failed_s if has_failed else state.policy.keep_stopped_s)
