"""The engine's own sleep before the driver's checkpoint.

Order, bytes left to copy, and the failure of either.
"""

from __future__ import annotations

import pytest

from services.nodeagent.domain.suspend_choice import choose
from services.nodeagent.suspend.cuda import CudaCheckpoint, State
from services.nodeagent.suspend.memory_usage import MemoryUsage
from services.nodeagent.suspend.port import Target
from services.nodeagent.suspend.sleep_cuda import SleepThenCheckpoint
from shared.contracts.engine import EngineAsleep
from shared.errors import CannotSuspend, EngineFailed
from tests.unit.suspend.fake_driver import FakeDriver, FakeGpu
from tests.unit.suspend.frozen_groups import GIB, A, B, Frozen


class Sleeper:
    """An engine that drops all but a gibibyte of `A` when it sleeps."""

    def __init__(self, driver: FakeDriver) -> None:
        self._driver = driver
        self.refuses = False

    async def __call__(self, instance_id: str, level: int) -> EngineAsleep:
        self._driver.calls.append((f"sleep {level}", 0))
        if self.refuses:
            raise EngineFailed("it is busy")
        self._driver.held[A] = GIB
        return EngineAsleep(level=level, took_ms=1.0)


@pytest.fixture
def driver() -> FakeDriver:
    return FakeDriver({A: 40 * GIB, B: GIB})


def ways(driver: FakeDriver) -> tuple[CudaCheckpoint, SleepThenCheckpoint, Sleeper]:
    gauge = MemoryUsage({"cuda:0": FakeGpu(driver)})
    cuda, sleeper = CudaCheckpoint(driver, "", Frozen(driver), gauge), Sleeper(driver)
    return cuda, SleepThenCheckpoint(cuda, sleeper, gauge), sleeper


def target(*levels: int) -> Target:
    return Target("i", "vllm", ("cuda:0",), (A, B), hosted=True, sleep_levels=levels)


async def test_engine_sleeps_and_is_then_checkpointed(driver: FakeDriver) -> None:
    _, both, _ = ways(driver)
    taken = await both.suspend(target(1, 2))
    assert [c for c, _ in driver.calls] == ["sleep 1", "lock", "lock", "checkpoint", "checkpoint", "freeze"]
    assert (taken.used_bytes, taken.left_bytes, taken.snapshot_bytes) == (41 * GIB, 0, 2 * GIB)
    driver.calls.clear()
    await both.resume(target(1, 2))
    assert [c for c, _ in driver.calls] == ["thaw", "restore", "restore", "unlock", "unlock"]


async def test_engine_that_refuses_to_sleep_keeps_running(driver: FakeDriver) -> None:
    _, both, sleeper = ways(driver)
    sleeper.refuses = True
    with pytest.raises(CannotSuspend, match="refused to sleep: it is busy"):
        await both.suspend(target(1))
    assert set(driver.states.values()) == {State.RUNNING}


async def test_failed_checkpoint_leaves_the_engine_asleep_and_running(driver: FakeDriver) -> None:
    _, both, _ = ways(driver)
    driver.fails.add(("checkpoint", B))
    with pytest.raises(CannotSuspend, match="checkpoint of pid"):
        await both.suspend(target(1))
    assert set(driver.states.values()) == {State.RUNNING}


def test_combined_method_needs_sleep_level_1(driver: FakeDriver) -> None:
    _, both, _ = ways(driver)
    assert both.outlook(target()).way is None
    assert "no sleep level 1" in both.outlook(target(2)).reason


async def test_faster_method_is_chosen_by_measured_times(driver: FakeDriver) -> None:
    cuda, both, _ = ways(driver)

    def chosen() -> str | None:
        return choose((cuda.outlook(target(1)), both.outlook(target(1)))).way

    assert chosen() == "cuda"
    cuda.learn(41 * GIB, 20.0)
    assert chosen() == "sleep_cuda"
    await both.suspend(target(1))
    driver.held[A] = 40 * GIB
    await both.resume(target(1))
    for _ in range(10):
        both.learn(2 * GIB, 60.0)
    assert chosen() == "cuda"
