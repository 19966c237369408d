"""A node without processes, its commands and reports: for tests of the nodeagent's decisions."""

from __future__ import annotations

from typing import Any

from services.nodeagent.domain import events as e
from services.nodeagent.domain.decide import decide
from services.nodeagent.domain.events import Effect, Event
from services.nodeagent.domain.memory import Ledger
from services.nodeagent.domain.state import Instance, NodeState, Outlook, Policy
from shared.contracts.base import ErrorBody
from shared.contracts.engine import EngineReport, EngineState
from shared.contracts.model_info import ModelInfo
from shared.contracts.models import ModelCard, ModelSpec
from shared.contracts.node import ResumeInstance, StartInstance, StopInstance, SuspendInstance

EPOCH = 1 << 32
ERROR = ErrorBody(code="engine_failed", message="it died")
CARD = ModelCard(
    spec=ModelSpec(name="demo", source="/nowhere", init_timeout=100),
    info=ModelInfo(
        source="/nowhere",
        revision="r",
        architecture="A",
        model_type="a",
        task="generate",
        weights_bytes=100,
        parameters=1,
        dtype="float32",
        context_length=8,
        kv_bytes_per_token=1,
    ),
    created=0,
)


def start(instance_id: str = "i", *, token: int = EPOCH, reserve: int = 60, devices: tuple[str, ...] = ("cpu:0",)) -> StartInstance:
    return StartInstance(
        token=token, plan_id="p", instance_id=instance_id, card=CARD, device_ids=devices, reserve_bytes=reserve, kv_bytes=1
    )


def stop(instance_id: str = "i", *, token: int = EPOCH, only_if_idle: bool = False, drain_timeout_ms: int = 1000) -> StopInstance:
    return StopInstance(token=token, instance_id=instance_id, only_if_idle=only_if_idle, drain_timeout_ms=drain_timeout_ms)


def report(instance_id: str = "i", state: EngineState = "ready", pid: int = 7, progress: float = 0.0) -> EngineReport:
    return EngineReport(instance_id=instance_id, pid=pid, state=state, progress=progress)


def suspend(
    instance_id: str = "i", *, token: int = EPOCH, only_if_idle: bool = False, drain_timeout_ms: int = 1000
) -> SuspendInstance:
    return SuspendInstance(token=token, instance_id=instance_id, only_if_idle=only_if_idle, drain_timeout_ms=drain_timeout_ms)


def resume(instance_id: str = "i", *, token: int = EPOCH, **more: int) -> ResumeInstance:
    return ResumeInstance(token=token, plan_id="p2", instance_id=instance_id, **more)


POSSIBLE = Outlook(way="cpu", left_bytes=10, snapshot_bytes=50, resume_s=0.1)
"""The outlook of an engine that can be suspended, and leaves 10 bytes of 60 on its device."""


class World:
    """A node with devices of 100 bytes, and all effects of its decisions in order."""

    def __init__(self, *devices: str, policy: Policy | None = None, snapshots: int = 120) -> None:
        ledger = Ledger(dict.fromkeys(devices or ("cpu:0",), 100))
        self.state = NodeState(ledger, policy or Policy(), snapshot_budget=snapshots)
        self.now = 1000.0
        self.effects: list[Effect] = []

    def receive(self, event: Event, after: float = 0.0) -> tuple[Effect, ...]:
        """Let `after` seconds pass, decide on `event`, and return the effects."""
        self.now += after
        self.state, effects = decide(self.state, event, self.now)
        self.effects += effects
        return effects

    def find(self, instance_id: str) -> Instance | None:
        return self.state.instances.get(instance_id)

    def __getitem__(self, instance_id: str) -> Instance:
        return self.state.instances[instance_id]

    # States that many tests begin with.

    def ready(self, instance_id: str = "i", pid: int = 7, took: float = 5.0, **more: Any) -> Instance:
        """Return an instance that took `took` seconds to start, and can be suspended."""
        self.receive(e.StartCommand(start(instance_id, **more), 1))
        self.receive(e.EngineForked(instance_id, pid, 1))
        self.receive(e.EngineReported(report(instance_id, "ready", pid)), after=took)
        self.receive(e.Assessed(instance_id, POSSIBLE, 60))
        return self[instance_id]

    def suspended(self, instance_id: str = "i", pid: int = 7, left: int = 10, snapshot: int = 50, **more: Any) -> Instance:
        """Return a suspended instance, with `left` bytes on its device and `snapshot` beside it."""
        self.ready(instance_id, pid, **more)
        return self.suspended_again(instance_id, left, snapshot)

    def suspended_again(self, instance_id: str = "i", left: int = 10, snapshot: int = 50) -> Instance:
        """Suspend an instance that is ready, and return it."""
        self.receive(e.SuspendCommand(suspend(instance_id), 2))
        self.receive(e.PauseAnswered(instance_id, False))
        self.receive(e.Suspended(instance_id, freed_bytes=60 - left, left_bytes=left, used_bytes=60, snapshot_bytes=snapshot))
        return self[instance_id]
