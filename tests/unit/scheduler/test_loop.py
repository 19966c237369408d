"""The scheduler's timer: rare ticks while idle, and none too late when an event makes it busy."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest

from services.scheduler import loop as loop_module
from services.scheduler.adapters import clock
from services.scheduler.adapters.load_traces import LoadTraces
from services.scheduler.domain.effects import Effect
from services.scheduler.domain.events import DemandReceived, Tick
from services.scheduler.domain.policy import Policy
from services.scheduler.loop import SchedulerLoop
from shared.contracts.demand import Demand
from shared.tasks import end
from tests.unit.scheduler.world import World

SOON_S = 60.0


class Nothing:
    """A repository and an outbox that do nothing."""

    async def commit(self, epoch: int, changes: Any) -> None: ...
    def carry_out(self, effects: list[Effect], now: float) -> None: ...
    def node_reported(self, node: str, boot_id: str) -> None: ...


class Connected:
    """A connection that works and is not to be probed."""

    async def find_start(self, *, probe: bool) -> float:
        assert not probe
        return 0.0


CONNECTED = cast("Any", Connected())


@pytest.fixture
async def idle_loop(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[SchedulerLoop]:
    """A loop with one model and no node, whose idle ticks are an hour apart."""
    monkeypatch.setattr(loop_module, "IDLE_TICK_S", 3600.0)
    w = World()
    w.model("m")
    loads = LoadTraces()
    loop = SchedulerLoop(w.state, cast("Any", Nothing()), loads, Policy())
    running = asyncio.create_task(loop.run(cast("Any", Nothing())))
    yield loop
    await end(running)
    loads.close()


async def test_event_that_makes_the_state_busy_brings_the_tick_forward(idle_loop: SchedulerLoop) -> None:
    ticking = asyncio.create_task(idle_loop.next_tick(CONNECTED))
    idle_loop.post(Tick(clock.now()))
    await idle_loop.wait_until_idle()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asyncio.shield(ticking), 2 * loop_module.TICK_S)
    idle_loop.post(DemandReceived(clock.now(), Demand(gateway="g", model="m", waiting=1), "w"))
    await asyncio.wait_for(ticking, SOON_S)


async def test_a_busy_state_ticks_at_the_short_period(idle_loop: SchedulerLoop) -> None:
    idle_loop.post(DemandReceived(clock.now(), Demand(gateway="g", model="m", waiting=1), "w"))
    await idle_loop.wait_until_idle()
    for _ in range(2):
        await asyncio.wait_for(idle_loop.next_tick(CONNECTED), SOON_S)
