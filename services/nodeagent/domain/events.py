"""Inputs and outputs of a nodeagent's decisions.

Inputs are events (past tense) and commands; outputs are effects.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from services.nodeagent.domain.late_binding import Traffic
from services.nodeagent.domain.state import Instance, Outlook
from shared.contracts.base import ErrorBody
from shared.contracts.engine import EngineReport
from shared.contracts.node import ResumeInstance, StartInstance, StopInstance, SuspendInstance, SuspendWay
from shared.engines.final_charges import FinalCharges
from shared.unit_charges import SharedUnits


@dataclass(frozen=True)
class StartCommand:
    command: StartInstance
    reply: int


@dataclass(frozen=True)
class StopCommand:
    command: StopInstance
    reply: int


@dataclass(frozen=True)
class SuspendCommand:
    command: SuspendInstance
    reply: int


@dataclass(frozen=True)
class ResumeCommand:
    command: ResumeInstance
    reply: int


@dataclass(frozen=True)
class PauseAnswered:
    """The engine's answer to `PauseEngine`.

    Attributes:
        error: None: the engine is idle and refuses new requests.
    """

    instance_id: str
    only_if_idle: bool
    error: ErrorBody | None = None


@dataclass(frozen=True)
class Suspended:
    """The instance is suspended, and its memory was measured."""

    instance_id: str
    freed_bytes: int
    left_bytes: int
    used_bytes: int
    snapshot_bytes: int


@dataclass(frozen=True)
class SuspendFailed:
    """The instance was not suspended and runs as before.

    Its engine may still refuse requests.
    """

    instance_id: str
    error: ErrorBody


@dataclass(frozen=True)
class Resumed:
    """The instance is resumed and verified: health, tokens and memory.

    Attributes:
        used_bytes: Device memory in use.
    """

    instance_id: str
    used_bytes: int


@dataclass(frozen=True)
class Spilled:
    """A snapshot was moved from host memory to swap, or could not be moved.

    Attributes:
        error: Why it was not moved; None: it was.
    """

    instance_id: str
    freed_bytes: int = 0
    error: ErrorBody | None = None


@dataclass(frozen=True)
class ResumeFailed:
    instance_id: str
    error: ErrorBody


@dataclass(frozen=True)
class Assessed:
    """The outlook of a suspension, and the memory that the instance holds.

    On cpu that includes swap.
    """

    instance_id: str
    outlook: Outlook
    used_bytes: int


@dataclass(frozen=True)
class Measured:
    """Device memory of an instance in bytes, weights included."""

    instance_id: str
    used_bytes: int


@dataclass(frozen=True)
class EngineForked:
    """An engine's process was started.

    Attributes:
        process_start: In clock ticks since boot; identifies a process together with the pid.
    """

    instance_id: str
    pid: int
    process_start: int


@dataclass(frozen=True)
class ForkFailed:
    """The launcher has verified that there is no process."""

    instance_id: str
    error: ErrorBody


@dataclass(frozen=True)
class TakeFailed:
    """The engine of a template was not handed over."""

    instance_id: str
    error: ErrorBody


@dataclass(frozen=True)
class EngineReported:
    report: EngineReport


@dataclass(frozen=True)
class EngineExited:
    """An engine's process has exited, or its executor has detached it.

    Attributes:
        error: Explains the exit if it was not requested.
        culprit: Instance for which an executor was computing when it exited; empty: none.
        is_stuck: The agent killed the executor because a step of the culprit did not end.
        is_fault: The process itself caused the exit, whatever the exit status says
            (`Executors.is_fault`).
        charges: Its last meters; None: they are not known.
        is_detached: The process is an executor, and still runs.
    """

    instance_id: str
    pid: int
    returncode: int | None
    error: ErrorBody
    culprit: str = ""
    is_stuck: bool = False
    is_fault: bool = False
    charges: FinalCharges | None = None
    is_detached: bool = False


@dataclass(frozen=True)
class DrainAnswered:
    """The engine's answer to `RequestDrain`.

    Attributes:
        error: None: the engine drains.
    """

    instance_id: str
    only_if_idle: bool
    error: ErrorBody | None = None


@dataclass(frozen=True)
class MemoryFreed:
    """The kernel no longer accounts memory to the process.

    It had `freed_bytes` before.
    """

    instance_id: str
    freed_bytes: int


@dataclass(frozen=True)
class WeightsReleased:
    instance_id: str
    freed_bytes: int


@dataclass(frozen=True)
class ReleaseFailed:
    instance_id: str
    error: ErrorBody


@dataclass(frozen=True)
class LoaderReported:
    """A status of the loader.

    Attributes:
        loaded: Bytes fetched or loaded so far, by holder.
        units: Weights on separate devices, by device.
        traffic: Loads on links, and weights on devices.
    """

    loaded: Mapping[str, int]
    units: Mapping[str, SharedUnits] = field(default_factory=dict)
    traffic: Traffic = Traffic()


@dataclass(frozen=True)
class Adopted:
    """A record of an earlier run of this agent.

    Args:
        instance: The recorded instance.
        alive: True if its process (same pid and start time) is running.
        error: Explains the exit if it is not.
        frozen: True if its processes are as its suspension left them.
        culprit: The instance for which an executor was computing when it exited.
        is_fault: True if the executor reported a fault of its own before it exited.
        charges: The last meters of an ended engine; None: they are not known.
    """

    instance: Instance
    alive: bool
    error: ErrorBody
    frozen: bool = False
    culprit: str = ""
    is_fault: bool = False
    charges: FinalCharges | None = None


@dataclass(frozen=True)
class NatsProbed:
    """The agent has probed its connection to NATS, because adopted engines have not reported."""

    is_reachable: bool


@dataclass(frozen=True)
class Shutdown:
    """The agent shuts down: every engine drains within `timeout_s`."""

    timeout_s: float


@dataclass(frozen=True)
class Tick:
    """Time has passed."""


Event = (
    StartCommand
    | StopCommand
    | SuspendCommand
    | ResumeCommand
    | PauseAnswered
    | Suspended
    | SuspendFailed
    | Resumed
    | ResumeFailed
    | Spilled
    | Assessed
    | Measured
    | EngineForked
    | ForkFailed
    | TakeFailed
    | EngineReported
    | EngineExited
    | DrainAnswered
    | MemoryFreed
    | WeightsReleased
    | ReleaseFailed
    | LoaderReported
    | Adopted
    | NatsProbed
    | Shutdown
    | Tick
)


@dataclass(frozen=True)
class Fork:
    instance_id: str


@dataclass(frozen=True)
class Prepare:
    """Have the loader begin to load the instance's weights to its device."""

    instance_id: str


@dataclass(frozen=True)
class Take:
    """Wake the engine of the ended instance `template`, and have it become `instance_id`.

    The process is that of `template`. If it cannot be handed over, `TakeFailed` follows.
    """

    instance_id: str
    template: str


@dataclass(frozen=True)
class RequestDrain:
    instance_id: str
    only_if_idle: bool
    reason: str


@dataclass(frozen=True)
class PauseEngine:
    """Ask the engine to refuse new requests, if it is idle."""

    instance_id: str
    only_if_idle: bool


@dataclass(frozen=True)
class Suspend:
    """Freeze the engine and free its memory.

    Answered by `Suspended` or `SuspendFailed`.
    """

    instance_id: str
    way: SuspendWay


@dataclass(frozen=True)
class Resume:
    """Resume and verify the engine.

    Answered by `Resumed` or `ResumeFailed`.

    Attributes:
        way: How it was suspended; None: it was only paused.
    """

    instance_id: str
    way: SuspendWay | None


@dataclass(frozen=True)
class Spill:
    """Write a suspended instance's snapshot to swap. Answered by `Spilled`."""

    instance_id: str
    way: SuspendWay


@dataclass(frozen=True)
class Assess:
    """Assess in `after_s` seconds how the engine could be suspended.

    Answered by `Assessed` if it is ready then.
    """

    instance_id: str
    after_s: float = 0.0


@dataclass(frozen=True)
class Ping:
    """Ask the engine for a report now."""

    instance_id: str


@dataclass(frozen=True)
class Signal:
    instance_id: str
    signal: Literal["term", "kill"]


@dataclass(frozen=True)
class Measure:
    """Measure the process's memory while it exists.

    So the memory freed by its exit is known.
    """

    instance_id: str
    after_s: float = 0.0


@dataclass(frozen=True)
class VerifyMemoryFreed:
    instance_id: str


@dataclass(frozen=True)
class Release:
    instance_id: str


@dataclass(frozen=True)
class Persist:
    instance_id: str


@dataclass(frozen=True)
class PersistEpoch:
    epoch: int


@dataclass(frozen=True)
class PersistCrashes:
    """Write the number of crashes of executors by model."""

    crashes: Mapping[str, int]


@dataclass(frozen=True)
class Forget:
    instance_id: str


@dataclass(frozen=True)
class Reply:
    """The reply to a command.

    Attributes:
        error: None: the command was executed.
    """

    reply: int
    error: ErrorBody | None = None


@dataclass(frozen=True)
class Publish:
    """Publish the status.

    Attributes:
        urgent: False: only load, progress or a step of an attach have changed. Such a status may
            wait a little.
        is_awaited: Requests wait for it, so that it does not wait for other changes.
    """

    urgent: bool = True
    is_awaited: bool = False


Effect = (
    Fork
    | Prepare
    | Take
    | RequestDrain
    | PauseEngine
    | Suspend
    | Resume
    | Spill
    | Assess
    | Ping
    | Signal
    | Measure
    | VerifyMemoryFreed
    | Release
    | Persist
    | PersistEpoch
    | PersistCrashes
    | Forget
    | Reply
    | Publish
)
