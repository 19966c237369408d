"""The level of an engine's own sleep.

It keeps weights if they have room, and drops them otherwise.
"""

from __future__ import annotations

import pytest

from services.nodeagent.suspend import sleep
from services.nodeagent.suspend.memory_usage import MemoryUsage
from services.nodeagent.suspend.port import Target
from services.nodeagent.suspend.sleep import EngineSleep
from shared.contracts.engine import EngineAsleep
from shared.errors import CannotSuspend

GIB = 1 << 30


class Device(MemoryUsage):
    """`cuda:0`, of which the awake engine has forty gibibytes."""

    def __init__(self) -> None:
        super().__init__({})
        self.level = 0
        self.blind = False

    def used_bytes(self, target: Target) -> int:
        if self.blind:
            return 0
        return 40 * GIB if not self.level else GIB

    async def sleep(self, instance_id: str, level: int) -> EngineAsleep:
        self.level = level
        return EngineAsleep(level=level, took_ms=1.0)


def target(*levels: int) -> Target:
    return Target("i", "vllm", ("cuda:0",), (), hosted=True, sleep_levels=levels)


@pytest.mark.parametrize(
    ("levels", "budget", "free", "level"),
    [
        ((1, 2), 64 * GIB, 64 * GIB, 1),
        ((1, 2), 8 * GIB, 64 * GIB, 2),
        ((1, 2), 64 * GIB, 8 * GIB, 2),
        ((1,), 8 * GIB, 64 * GIB, 1),
        ((2,), 64 * GIB, 64 * GIB, 2),
    ],
)
async def test_sleep_level_follows_from_free_memory_and_budget(
    monkeypatch: pytest.MonkeyPatch, levels: tuple[int, ...], budget: int, free: int, level: int
) -> None:
    monkeypatch.setattr(sleep, "available_bytes", lambda: free)
    device = Device()
    way = EngineSleep(device, device.sleep, budget)
    outlook = way.outlook(target(*levels))
    assert (outlook.snapshot_bytes > 0) is (level == 1)
    taken = await way.suspend(target(*levels))
    assert device.level == level
    assert taken.left_bytes == GIB


def test_resume_takes_longer_if_weights_must_be_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sleep, "available_bytes", lambda: 64 * GIB)
    device = Device()
    kept, dropped = (EngineSleep(device, device.sleep, budget).outlook(target(1, 2)) for budget in (64 * GIB, 8 * GIB))
    assert dropped.resume_s > 2 * kept.resume_s


async def test_sleep_is_refused_if_freed_bytes_cannot_be_verified() -> None:
    """Without visible bytes the engine's own report does not count.

    In a pid namespace of its own NVML's pids differ: no bytes before and none after prove nothing.
    """
    device = Device()
    device.blind = True
    way = EngineSleep(device, device.sleep, 64 * GIB)
    assert "could not be verified" in way.outlook(target(1, 2)).reason
    with pytest.raises(CannotSuspend, match="could not be verified"):
        await way.suspend(target(1, 2))
    assert device.level == 0


class LateDevice(Device):
    """A device whose driver frees the memory after the engine's report.

    Before that another process maps a page of the engine's files, and the engine has a part of it.
    """

    def __init__(self) -> None:
        super().__init__()
        self._before = iter((40 * GIB, 40 * GIB - 2048, 40 * GIB - 2048))

    def used_bytes(self, target: Target) -> int:
        return next(self._before, GIB)


async def test_memory_that_is_freed_after_the_report_is_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sleep, "_POLL_S", 0.0)
    device = LateDevice()
    assert (await EngineSleep(device, device.sleep, 64 * GIB).suspend(target(2))).left_bytes == GIB
