"""The computing thread of several models."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest

from services.engine.domain.fair_slots import Flow
from services.engine.generation import device_loop
from services.engine.generation.batcher import Batcher
from services.engine.generation.device_loop import DeviceLoop
from services.engine.generation.flow_work import FlowWork

WITHIN_S = 60.0


class Clock:
    """The clock of the computing thread: only steps take time, whatever else the machine does."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


class ScriptedBatcher:
    """A batcher with a number of steps to do, each of a given length of the clock."""

    def __init__(
        self, journal: list[tuple[str, bool]], name: str, steps: int, step_s: float = 0.0, clock: Clock | None = None
    ) -> None:
        self.journal, self.name, self.left, self.step_s = journal, name, steps, step_s
        self.clock = clock or Clock()
        self.stopping = False
        self.commands = self.applied = 0
        self.flows = [Flow()]
        self.required_requests: float | None = None
        self.due_at: float | None = None
        self.error: Exception | None = None
        self.on_command: Callable[[], None] = lambda: None

    def next_step_at(self, now: float) -> float:
        return now if self.left or self.stopping or self.error else float("inf")

    def has_commands(self) -> bool:
        return self.commands > 0

    def flow_work(self, now: float) -> dict[Flow, FlowWork]:
        return {flow: FlowWork(deadline=self.due_at) for flow in self.flows}

    def step(self, *, is_contended: bool, computes: bool = True) -> bool:
        if self.error is not None:
            raise self.error
        if self.stopping:
            return False
        self.applied, self.commands = self.applied + self.commands, 0
        if not computes:
            return True
        self.left -= 1
        self.journal.append((self.name, is_contended))
        self.clock.now += self.step_s
        return True

    def stop(self) -> None:
        self.stopping = True
        self.on_command()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(device_loop, "time", clock)
    return clock


@pytest.fixture
def device(clock: Clock) -> Iterator[DeviceLoop]:
    loop = DeviceLoop(1)
    yield loop
    loop.stop()


def serve(device: DeviceLoop, batcher: ScriptedBatcher) -> Any:
    return device.serve(batcher.name, cast("Batcher", batcher))


def test_single_token_of_one_model_runs_during_a_long_batch_of_another(device: DeviceLoop, clock: Clock) -> None:
    journal: list[tuple[str, bool]] = []
    long, short = ScriptedBatcher(journal, "long", 50, 0.002, clock), ScriptedBatcher(journal, "short", 1)
    blocked = threading.Event()
    device.submit("test", lambda: blocked.wait(WITHIN_S))
    ends = serve(device, long), serve(device, short)
    blocked.set()
    while long.left:
        device.submit("test", lambda: None).result(WITHIN_S)
    for batcher in (long, short):
        batcher.stop()
    for ended in ends:
        ended.result(WITHIN_S)
    at = [name for name, _ in journal].index("short")
    assert at <= 1, "the short one ran among the first steps"
    assert journal[at][1], "it knew that the other was waiting"
    assert not journal[-1][1], "the other did not wait for anybody at the end"


def test_error_outside_of_a_step_ends_the_models_and_not_the_thread(device: DeviceLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    broken, later = ScriptedBatcher([], "broken", 1), ScriptedBatcher([], "later", 1)

    def fail(now: float) -> float:
        raise KeyError("flow")

    with monkeypatch.context() as changed:
        changed.setattr(broken, "next_step_at", fail)
        with pytest.raises(KeyError):
            serve(device, broken).result(WITHIN_S)
    ended = serve(device, later)
    while later.left:
        device.submit("test", lambda: None).result(WITHIN_S)
    later.stop()
    ended.result(WITHIN_S)


def test_models_compute_in_the_order_of_their_objectives(device: DeviceLoop, clock: Clock) -> None:
    """Alpha is at its first value: the model that needs most has low priority."""
    journal: list[tuple[str, bool]] = []
    required = {"hopeless": 90.0, "complies": -5.0, "nearly": 2.0, "none": None}
    batchers = [ScriptedBatcher(journal, name, 3) for name in required]
    for batcher in batchers:
        batcher.required_requests = required[batcher.name]
        batcher.due_at = clock.now + WITHIN_S if batcher.name != "none" else None
    run_steps(device, batchers)
    names = [name for name, _ in journal if name != "none"]
    assert names == ["nearly"] * 3 + ["complies"] * 3 + ["hopeless"] * 3


def run_steps(device: DeviceLoop, batchers: list[ScriptedBatcher]) -> None:
    """Serve the batchers until they have no more steps, and stop them."""
    blocked = threading.Event()
    device.submit("test", lambda: blocked.wait(WITHIN_S))
    ends = [serve(device, batcher) for batcher in batchers]
    blocked.set()
    while any(batcher.left for batcher in batchers):
        device.submit("test", lambda: None).result(WITHIN_S)
    for batcher, ended in zip(batchers, ends, strict=True):
        batcher.stop()
        ended.result(WITHIN_S)


def test_key_with_many_models_gets_no_more_turns_than_one_with_one_model(device: DeviceLoop, clock: Clock) -> None:
    journal: list[tuple[str, bool]] = []
    flood = [ScriptedBatcher(journal, f"flood{i}", 8, 0.002, clock) for i in range(4)]
    other = ScriptedBatcher(journal, "other", 8, 0.002, clock)
    for batcher in flood:
        batcher.flows = [Flow(0, "a")]
    other.flows = [Flow(0, "b")]
    run_steps(device, [*flood, other])
    last = max(at for at, (name, _) in enumerate(journal) if name == "other")
    assert last < 24, "of 40 steps; by models it would have had one of five turns"
    assert {name for name, _ in journal[:16]} == {"other", *(b.name for b in flood)}, "each model of the key has turns"


def test_lower_priority_computes_when_nothing_else_does_but_its_commands_take_effect(device: DeviceLoop) -> None:
    journal: list[tuple[str, bool]] = []
    batch, urgent = ScriptedBatcher(journal, "batch", 3), ScriptedBatcher(journal, "urgent", 5)
    batch.flows, batch.commands = [Flow(-100, "b")], 2
    run_steps(device, [batch, urgent])
    assert [name for name, _ in journal] == ["urgent"] * 5 + ["batch"] * 3
    assert batch.applied == 2


def test_batcher_that_fails_ends_alone(device: DeviceLoop) -> None:
    journal: list[tuple[str, bool]] = []
    broken, healthy = ScriptedBatcher(journal, "broken", 0), ScriptedBatcher(journal, "healthy", 3)
    broken.error = RuntimeError("broken beyond its requests")
    failed, ended = serve(device, broken), serve(device, healthy)
    with pytest.raises(RuntimeError, match="broken beyond"):
        failed.result(WITHIN_S)
    healthy.stop()
    ended.result(WITHIN_S)


def test_stopped_batcher_is_forgotten_and_its_name_can_be_used_again(device: DeviceLoop) -> None:
    journal: list[tuple[str, bool]] = []
    for _ in range(3):
        batcher = ScriptedBatcher(journal, "again", 1)
        ended = serve(device, batcher)
        batcher.stop()
        ended.result(WITHIN_S)


def test_loop_names_the_model_that_computes_and_none_while_it_waits() -> None:
    named: list[str | None] = []
    idle = threading.Event()

    def on_step(name: str | None) -> None:
        named.append(name)
        if name is None and "model" in named:
            idle.set()

    device = DeviceLoop(1, on_step)
    try:
        batcher = ScriptedBatcher([], "model", 2)
        serve(device, batcher)
        assert idle.wait(WITHIN_S)
    finally:
        device.stop()
    assert named[-1] is None
    assert named.count("model") == 2


def test_error_of_a_job_reaches_its_caller(device: DeviceLoop) -> None:
    def fail() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        device.submit("test", fail).result(WITHIN_S)
    assert device.submit("test", lambda: 3).result(WITHIN_S) == 3
