"""The tasks beside a term of leadership."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any, cast

from services.scheduler.app import _background_tasks, _tick
from services.scheduler.domain.events import Event, Tick


class FailingOnce:
    """A loop, a bucket and a database that answer nothing; the first tick fails."""

    def __init__(self) -> None:
        self.calls = 0
        self.posted = asyncio.Event()
        self.events: list[Event] = []

    async def next_tick(self, _: Any) -> Tick:
        self.calls += 1
        if self.calls == 1:
            raise KeyError("i-1")
        if self.calls > 2:
            await asyncio.Event().wait()
        return Tick(0.0)

    def post(self, event: Event) -> None:
        self.events.append(event)
        self.posted.set()

    async def wait_until_idle(self) -> None:
        await asyncio.Event().wait()

    async def prune(self, *_: Any) -> None:
        await asyncio.Event().wait()

    async def watch(self) -> None:
        await asyncio.Event().wait()


async def test_tick_that_fails_is_not_the_last_one() -> None:
    """Without ticks the leader would not notice lost nodes, stalled starts and idle instances."""
    loop = cast(Any, FailingOnce())
    tick = {"tick": partial(_tick, loop, cast(Any, None))}
    async with asyncio.timeout(30), _background_tasks(loop, loop, loop, 1, loop, tick):
        await loop.posted.wait()
    assert isinstance(loop.events[0], Tick)
