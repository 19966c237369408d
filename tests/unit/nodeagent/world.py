"""Instances, commands and reports for the domain's tests."""

from __future__ import annotations

from services.nodeagent.domain.events import Effect, Event
from services.nodeagent.domain.machine import decide
from services.nodeagent.domain.memory import Ledger
from services.nodeagent.domain.state import Instance, NodeState, Policy
from shared.contracts.base import ErrorBody
from shared.contracts.engine import EngineReport, EngineState
from shared.contracts.models import ModelCard, ModelInfo, ModelSpec
from shared.contracts.node import StartInstance, StopInstance

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


class World:
    """A node with devices of 100 bytes, its effects as they come."""

    def __init__(self, *devices: str, policy: Policy | None = None) -> None:
        self.state = NodeState(Ledger(dict.fromkeys(devices or ("cpu:0",), 100)), policy or Policy())
        self.now = 1000.0
        self.effects: list[Effect] = []

    def hear(self, event: Event, after: float = 0.0) -> tuple[Effect, ...]:
        self.now += after
        self.state, effects = decide(self.state, event, self.now)
        self.effects += effects
        return effects

    def __getitem__(self, instance_id: str) -> Instance:
        return self.state.instances[instance_id]
