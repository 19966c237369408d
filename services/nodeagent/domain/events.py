"""What a nodeagent hears (events, past tense, and commands) and what it does about it (effects)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from services.nodeagent.domain.state import Instance, Outlook
from shared.contracts.base import ErrorBody
from shared.contracts.engine import EngineReport
from shared.contracts.node import ResumeInstance, StartInstance, StopInstance, SuspendInstance, SuspendWay


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
class HoldAnswered:
    """The engine's answer to `AskHold`; `error` None: it serves nobody, and takes nothing new."""

    instance_id: str
    only_if_idle: bool
    error: ErrorBody | None = None


@dataclass(frozen=True)
class Suspended:
    """Read back: `left_bytes` of its device are still in use, `freed_bytes` are not any more."""

    instance_id: str
    freed_bytes: int
    left_bytes: int
    used_bytes: int
    snapshot_bytes: int


@dataclass(frozen=True)
class SuspendFailed:
    """It was not suspended, and runs as before (its engine may still take no requests)."""

    instance_id: str
    error: ErrorBody


@dataclass(frozen=True)
class Resumed:
    """It is as it was: health, tokens and bytes have been looked at. `used_bytes` of its device."""

    instance_id: str
    used_bytes: int


@dataclass(frozen=True)
class Spilled:
    """Its snapshot went from host memory to swap: `freed_bytes` of it. `error`: it did not."""

    instance_id: str
    freed_bytes: int = 0
    error: ErrorBody | None = None


@dataclass(frozen=True)
class ResumeFailed:
    instance_id: str
    error: ErrorBody


@dataclass(frozen=True)
class Assessed:
    """What a suspension would do, and what the instance holds now: of its device, and on cpu of swap."""

    instance_id: str
    outlook: Outlook
    used_bytes: int


@dataclass(frozen=True)
class Measured:
    """What an instance uses of its devices, in bytes, its weights included."""

    instance_id: str
    used_bytes: int


@dataclass(frozen=True)
class EngineForked:
    """`process_start`: when the process started, in clock ticks since boot; with the pid it names a process for good."""

    instance_id: str
    pid: int
    process_start: int


@dataclass(frozen=True)
class ForkFailed:
    """There is no process, proved by the launcher."""

    instance_id: str
    error: ErrorBody


@dataclass(frozen=True)
class EngineReported:
    report: EngineReport


@dataclass(frozen=True)
class EngineExited:
    """The process is gone. `error` is what there is to say about it if nobody asked it to go."""

    instance_id: str
    pid: int
    returncode: int | None
    error: ErrorBody


@dataclass(frozen=True)
class DrainAnswered:
    """The engine's answer to `AskDrain`; `error` None: it drains."""

    instance_id: str
    only_if_idle: bool
    error: ErrorBody | None = None


@dataclass(frozen=True)
class MemoryProved:
    """The kernel knows no memory of the process any more; it had `freed_bytes` of its own before."""

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
class LoaderHeard:
    """The loader is there. `loaded`: bytes fetched or loaded so far by holder."""

    loaded: Mapping[str, int]


@dataclass(frozen=True)
class Adopted:
    """A record of an earlier run of this agent. `alive`: its process, same pid and same start time, still runs.
    `frozen`: its control group is."""

    instance: Instance
    alive: bool
    error: ErrorBody
    frozen: bool = False


@dataclass(frozen=True)
class Shutdown:
    """This agent ends in an orderly way: every engine leaves within `timeout_s`."""

    timeout_s: float


@dataclass(frozen=True)
class Tick:
    """Time has passed."""


Event = (
    StartCommand
    | StopCommand
    | SuspendCommand
    | ResumeCommand
    | HoldAnswered
    | Suspended
    | SuspendFailed
    | Resumed
    | ResumeFailed
    | Spilled
    | Assessed
    | Measured
    | EngineForked
    | ForkFailed
    | EngineReported
    | EngineExited
    | DrainAnswered
    | MemoryProved
    | WeightsReleased
    | ReleaseFailed
    | LoaderHeard
    | Adopted
    | Shutdown
    | Tick
)


@dataclass(frozen=True)
class Fork:
    instance_id: str


@dataclass(frozen=True)
class AskDrain:
    instance_id: str
    only_if_idle: bool
    reason: str


@dataclass(frozen=True)
class AskHold:
    """Have the engine take no new request, if it serves none."""

    instance_id: str
    only_if_idle: bool


@dataclass(frozen=True)
class Suspend:
    """Freeze it and take its memory; answered by `Suspended` or `SuspendFailed`."""

    instance_id: str
    way: SuspendWay


@dataclass(frozen=True)
class Resume:
    """Bring it back and prove that it is as before; answered by `Resumed` or `ResumeFailed`. `way` None: it was held, no more."""

    instance_id: str
    way: SuspendWay | None


@dataclass(frozen=True)
class Spill:
    """Write a suspended instance's snapshot to swap; answered by `Spilled`."""

    instance_id: str
    way: SuspendWay


@dataclass(frozen=True)
class Assess:
    """Find out, in `after_s` seconds, whether and how it could be suspended; answered by `Assessed`, if it is ready then."""

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
    """Read the process's memory while it is still there, so that what its end frees is known."""

    instance_id: str
    after_s: float = 0.0


@dataclass(frozen=True)
class ProveMemory:
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
class Forget:
    instance_id: str


@dataclass(frozen=True)
class Reply:
    """`error` None: done."""

    reply: int
    error: ErrorBody | None = None


@dataclass(frozen=True)
class Publish:
    """The node's status has changed. Not `urgent`: only loads and progress have, which may wait a little."""

    urgent: bool = True


Effect = (
    Fork
    | AskDrain
    | AskHold
    | Suspend
    | Resume
    | Spill
    | Assess
    | Ping
    | Signal
    | Measure
    | ProveMemory
    | Release
    | Persist
    | PersistEpoch
    | Forget
    | Reply
    | Publish
)
