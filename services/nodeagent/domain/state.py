"""The state that a nodeagent's loop owns. Times are seconds of the machine's monotonic clock, which outlives the agent's process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from services.nodeagent.domain.memory import Ledger
from shared.contracts.base import ErrorBody, Frozen
from shared.contracts.engine import EngineLoad
from shared.contracts.node import InstanceState, StartInstance
from shared.contracts.phases import Phase

EPOCH_SHIFT = 32
RELEASE_RETRY_S = 1.0
STRAY_HOLDER_S = 30.0
"""The loader and this node hear of a start at the same time; one that holds weights this long and was never started here was refused."""


class Process(StrEnum):
    FORKING = "forking"
    ALIVE = "alive"
    GONE = "gone"


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
    """A `StopInstance(only_if_idle)` that waits for the engine's answer."""

    reply: int
    drain_timeout_s: float


@dataclass(frozen=True)
class NodeState:
    ledger: Ledger
    policy: Policy = Policy()
    instances: Mapping[str, Instance] = field(default_factory=dict)
    idle_asks: Mapping[str, tuple[IdleAsk, ...]] = field(default_factory=dict)
    strays: Mapping[str, float] = field(default_factory=dict)
    newest_epoch: int = 0
    stopping: bool = False

    def live(self) -> tuple[Instance, ...]:
        """Instances that still hold something."""
        return tuple(i for i in self.instances.values() if i.ended_at is None)


def deadlines(state: NodeState) -> list[float]:
    """When a `Tick` will have something to do."""
    found: list[float] = []
    for i in state.instances.values():
        found += [t for t in (i.adopt_until, i.drain_until, i.kill_at, i.release_at) if t is not None]
        if i.state.starting:
            found.append(i.progress_at + i.command.card.spec.init_timeout)
        if i.ended_at is not None:
            found.append(i.ended_at + state.policy.keep_ended_s)
    return found
