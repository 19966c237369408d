"""The output that an engine's later probes must equal, against a stand-in engine."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from services.enginehost.drivers.port import Driver
from services.enginehost.drivers.probe_response import KeptOutput
from services.enginehost.http1 import Client, HttpError
from shared.errors import EngineFailed


class Engine:
    """Stands for the driver and the client of an engine. It answers while `is_free` is set."""

    def __init__(self) -> None:
        self.is_free = asyncio.Event()
        self.asked = asyncio.Event()
        self.answered = asyncio.Event()
        self.fails = False
        self.requests = 0

    def probes(self, tokens: int) -> list[Any]:
        return ["a request"]

    async def ask(self, request: Any) -> tuple[int, bytes]:
        self.requests += 1
        self.asked.set()
        await self.is_free.wait()
        self.answered.set()
        if self.fails:
            raise HttpError("closed early")
        return 200, b'{"choices": [{"text": "answer %d"}]}' % self.requests

    def keep(self, output: KeptOutput) -> asyncio.Task[None]:
        return asyncio.create_task(output.keep(cast(Driver, self), cast(Client, self)))


async def cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize("ends_first", [True, False])
async def test_output_of_a_cancelled_call_is_that_of_the_next(ends_first: bool) -> None:
    """A pause has a deadline, which a slow engine exceeds: it is asked once all the same."""
    engine, output = Engine(), KeptOutput()
    first = engine.keep(output)
    await engine.asked.wait()
    await cancel(first)
    if ends_first:
        engine.is_free.set()
        await engine.answered.wait()
        await asyncio.sleep(0)
    second = engine.keep(output)
    engine.is_free.set()
    await second
    assert engine.requests == 1


async def test_call_after_a_failure_asks_again() -> None:
    engine, output = Engine(), KeptOutput()
    engine.is_free.set()
    engine.fails = True
    with pytest.raises(EngineFailed, match="closed early"):
        await engine.keep(output)
    engine.fails = False
    await engine.keep(output)
    assert engine.requests == 2
