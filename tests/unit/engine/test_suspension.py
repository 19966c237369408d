"""Commands to sleep, to wake and to probe an engine that arrive while it carries out another."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest

from services.engine.domain.sampling_params import SamplingParams, StopConditions
from services.engine.generation.batcher import Batcher
from services.engine.generation.events import Broken, Progressed
from services.engine.generation.request import Choice, GenerationRequest
from services.engine.server.migration import EngineMigration
from services.engine.server.request_reader import RequestReader
from services.engine.server.serving import Serving
from services.engine.server.suspension import Suspension
from shared.contracts.engine import EngineAsleep, EngineProbed
from shared.contracts.inference import ChoiceDelta, InferRequest
from shared.contracts.migration import PrepareResume
from shared.errors import EngineFailed, InstanceBusy, InstanceDraining
from shared.messaging import Mesh
from tests.unit.engine.lora_cards import card


class Reader:
    """Reads probes."""

    def read(self, request: InferRequest) -> GenerationRequest:
        stop = StopConditions(max_tokens=1)
        return GenerationRequest(request.request_id, (Choice(0, (1,), stop),), SamplingParams(temperature=0.0), 1, None, ())


class HeldBatcher:
    """Computes a request when the test says so."""

    def __init__(self) -> None:
        self.running: list[str] = []

    def submit(self, request: GenerationRequest) -> None:
        self.running.append(request.request_id)

    def cancel(self, request_id: str) -> None:
        if request_id in self.running:
            self.running.remove(request_id)


class Engine:
    """An engine that may be suspended, with its probes held."""

    def __init__(self) -> None:
        self._batcher = HeldBatcher()
        self.serving = Serving(cast(Mesh, None))
        self.serving.open(cast(RequestReader, cast(Any, Reader())), cast(Batcher, cast(Any, self._batcher)), 1)
        self._suspension = Suspension("i", card("a"), self.serving)

    @property
    def probes(self) -> int:
        """Return the number of probes that are computed now."""
        return len(self._batcher.running)

    def answer_newest(self, token: int) -> None:
        """Complete the probe that was asked for last, with a token."""
        delta = ChoiceDelta(token_ids=(token,), finish_reason="length")
        self.serving.on_events([Progressed(self._batcher.running.pop(), (delta,), 1, 0.0, done=True)])

    def fail_newest(self) -> None:
        self.serving.on_events([Broken(self._batcher.running.pop(), EngineFailed("a fault"))])

    async def refuses(self) -> bool:
        """Return whether the engine refuses a request of a gateway."""
        request = InferRequest(request_id="r", instance_id="i", model="m", endpoint="completion")
        try:
            await self.serving._handle_request(request, "reply", None, 0)
        except InstanceDraining:
            return True
        self.serving.cancel("r")
        return False

    async def sleep(self) -> tuple[EngineAsleep, bool]:
        """Return the answer, and whether the engine refuses requests then."""
        asleep = await self._suspension.sleep(0)
        return asleep, await self.refuses()

    async def wake(self) -> EngineProbed:
        return await self._suspension.wake()

    async def probe(self) -> EngineProbed:
        return await self._suspension.probe()

    def close(self) -> None:
        self.serving.close()


@pytest.fixture
async def engine() -> AsyncIterator[Engine]:
    engine = Engine()
    yield engine
    engine.close()


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_wake_during_a_sleep_takes_effect_after_it(engine: Engine) -> None:
    sleeping = asyncio.create_task(engine.sleep())
    await settle()
    waking = asyncio.create_task(engine.wake())
    await settle()
    engine.answer_newest(1)
    await settle()
    assert sleeping.done()
    assert not waking.done()
    assert sleeping.result()[1], "a paused engine is about to be frozen"
    engine.answer_newest(1)
    assert (await waking).same
    assert not await engine.refuses()


async def test_wake_during_a_sleep_compares_with_the_output_that_the_sleep_records(engine: Engine) -> None:
    sleeping = asyncio.create_task(engine.sleep())
    await settle()
    waking = asyncio.create_task(engine.wake())
    await settle()
    engine.answer_newest(1)
    await sleeping
    await settle()
    engine.answer_newest(2)
    assert not (await waking).same
    assert await engine.refuses()


async def test_changed_output_becomes_no_reference(engine: Engine) -> None:
    """A later wake would take it for the right one."""
    sleeping = asyncio.create_task(engine.sleep())
    await settle()
    engine.answer_newest(1)
    await sleeping
    waking = asyncio.create_task(engine.wake())
    await settle()
    again = asyncio.create_task(engine.sleep())
    await settle()
    engine.answer_newest(2)
    assert not (await waking).same
    with pytest.raises(EngineFailed, match="has changed"):
        await again
    assert await engine.refuses()


async def test_sleep_during_a_wake_takes_effect_after_it(engine: Engine) -> None:
    sleeping = asyncio.create_task(engine.sleep())
    await settle()
    engine.answer_newest(1)
    await sleeping
    waking = asyncio.create_task(engine.wake())
    await settle()
    again = asyncio.create_task(engine.sleep())
    await settle()
    assert engine.probes == 1
    engine.answer_newest(1)
    assert (await waking).same
    await settle()
    engine.answer_newest(1)
    _, refused = await again
    assert refused


async def test_sleep_waits_for_a_probe_and_not_for_requests(engine: Engine) -> None:
    probing = asyncio.create_task(engine.probe())
    await settle()
    sleeping = asyncio.create_task(engine.sleep())
    await settle()
    engine.answer_newest(1)
    assert (await probing).same
    await settle()
    engine.answer_newest(1)
    assert (await sleeping)[1]
    await engine_awake(engine)
    request = InferRequest(request_id="r", instance_id="i", model="m", endpoint="completion")
    await engine.serving._handle_request(request, "reply", None, 0)
    with pytest.raises(InstanceBusy):
        await engine.sleep()


async def engine_awake(engine: Engine) -> None:
    waking = asyncio.create_task(engine.wake())
    await settle()
    engine.answer_newest(1)
    assert (await waking).same


async def test_sleep_that_fails_leaves_the_engine_awake_for_the_next_command(engine: Engine) -> None:
    sleeping = asyncio.create_task(engine.sleep())
    await settle()
    again = asyncio.create_task(engine.sleep())
    await settle()
    engine.fail_newest()
    with pytest.raises(EngineFailed):
        await sleeping
    await settle()
    engine.answer_newest(1)
    assert (await again)[1]


async def test_probe_of_a_cancelled_command_keeps_the_engine_from_nothing(engine: Engine) -> None:
    waking = asyncio.create_task(engine.wake())
    await settle()
    waking.cancel()
    await settle()
    assert waking.cancelled()
    assert engine.probes == 0
    sleeping = asyncio.create_task(engine.sleep())
    await settle()
    engine.answer_newest(1)
    assert (await sleeping)[1]


async def test_engine_whose_output_differs_while_it_serves_may_sleep(engine: Engine) -> None:
    """A probe is computed in one batch with requests, and its output may differ by that."""
    sleeping = asyncio.create_task(engine.sleep())
    await settle()
    engine.answer_newest(1)
    await sleeping
    await engine_awake(engine)
    probing = asyncio.create_task(engine.probe())
    await settle()
    engine.answer_newest(2)
    assert not (await probing).same
    again = asyncio.create_task(engine.sleep())
    await settle()
    engine.answer_newest(1)
    assert (await again)[1]


async def test_probe_after_a_wake_does_not_let_a_changed_engine_sleep(engine: Engine) -> None:
    sleeping = asyncio.create_task(engine.sleep())
    await settle()
    engine.answer_newest(1)
    await sleeping
    waking = asyncio.create_task(engine.wake())
    await settle()
    engine.answer_newest(2)
    assert not (await waking).same
    probing = asyncio.create_task(engine.probe())
    await settle()
    engine.answer_newest(1)
    assert (await probing).same
    with pytest.raises(EngineFailed, match="has changed"):
        await engine.sleep()


async def test_nothing_is_prepared_in_a_paused_engine() -> None:
    """It may be frozen at any moment, and its memory is counted."""
    engine = Engine()
    engine.serving.pause()
    order = PrepareResume(prepared="p", revision="r1", sequences=((1, 2),))
    with pytest.raises(InstanceDraining):
        await EngineMigration(engine.serving).prepare(order)
