"""A running request migrates; its client gets one response, whatever fails."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from services.gateway.handlers import move_request
from shared.contracts import subjects
from shared.contracts.base import Done, Failure, Message
from shared.contracts.migration import MoveRequest, RequestMoved
from shared.contracts.node import InstanceState
from shared.errors import Conflict, DeadlineExceeded, InstanceDraining, InsufficientMemory, NotFound, StaleToken, ThawError
from tests.integration.gateway.conftest import Served, chat, until
from tests.integration.gateway.failover import TEXT, URL, content_of, die, holding
from tests.support.fake_engine import Behaviour, FakeEngine, FakeNode, Run, drain
from tests.support.scripted_engine import Script, Teller

LENGTH = len(TEXT.encode())
HELD = 9


@dataclass
class Moving:
    """A stream whose engine holds before a token."""

    node: FakeNode
    source: FakeEngine
    answer: asyncio.Task[httpx.Response]

    async def order(self, to: str, token: int = 1, migration: str = "m", **changes: Any) -> RequestMoved:
        run = self.source.requests[0]
        fields: dict[str, Any] = {
            "request_id": run.request.request_id,
            "migration_id": migration,
            "token": token,
            "source_instance": self.source.id,
            "instance_id": to,
            "deadline_ms": 20_000,
        }
        gateway = subjects.gateway_of(run.reply)
        return await self.node.mesh.request(subjects.gateway_control(gateway), MoveRequest(**(fields | changes)), RequestMoved)

    async def whole(self) -> None:
        answer = await self.answer
        assert answer.status_code == 200
        assert content_of(answer.text) == TEXT
        assert answer.text.endswith("data: [DONE]\n\n")
        assert '"error"' not in answer.text


@asynccontextmanager
async def held(
    gateway: Served, node: FakeNode, release: asyncio.Event | None = None, headers: dict[str, str] | None = None
) -> AsyncIterator[Moving]:
    source = await node.engine("alpha", Teller(Script((TEXT,)), holding(HELD, release)))
    answer = asyncio.create_task(gateway.http.post(URL, json=chat(stream=True), headers=headers))
    await source.until(lambda: bool(source.requests) and source.requests[0].seq == HELD + 1)
    yield Moving(node, source, answer)
    if not answer.done():
        answer.cancel()


async def destination(node: FakeNode, behaviour: Behaviour | None = None) -> FakeEngine:
    return await node.engine("alpha", behaviour or Teller(Script((TEXT,))))


@pytest.mark.parametrize("headers", [{}, {"idempotency-key": "k"}])
async def test_a_stream_resumes_on_the_destination(gateway: Served, node: FakeNode, headers: dict[str, str]) -> None:
    async with held(gateway, node, headers=headers) as move:
        teller = Teller(Script((TEXT,)))
        to = await destination(node, teller)
        moved = await move.order(to.id, prepared="m/r")
        await move.whole()
        assert (moved.instance_id, moved.tokens) == (to.id, HELD)
        assert moved.pause_ms > 0
        resume = to.requests[0].request.resume
        assert resume is not None
        assert (resume.prepared, resume.seed, resume.revision) == ("m/r", 3, "0")
        assert teller.made == LENGTH - HELD
        assert move.source.requests[0].yielding.is_set()
        # The client is done: a repeated order finds nothing.
        with pytest.raises(NotFound):
            await move.order(to.id)
        (handover,) = (await traced(gateway, await move.answer))["handovers"]
        assert (handover["kind"], handover["tokens"], handover["migration_id"]) == ("move", HELD, "m")
        assert (handover["source_instance"], handover["instance_id"]) == (move.source.id, to.id)
        metrics = (await gateway.http.get("/metrics")).text
        assert re.search(r'thaw_requests_handed_over_total\{.*thaw_kind="move".*\} 1.0', metrics)
        assert re.search(r'thaw_requests_pause_seconds_count\{.*thaw_kind="move".*\} 1.0', metrics)


async def traced(gateway: Served, answer: httpx.Response) -> dict[str, Any]:
    """Return the request's record, once it is stored."""
    found: list[httpx.Response] = []

    async def there() -> bool:
        found.append(await gateway.http.get(f"/admin/v1/traces/{answer.headers['x-request-id']}"))
        return found[-1].status_code == 200

    await until(there)
    trace: dict[str, Any] = found[-1].json()
    return trace


async def test_completed_order_may_be_repeated_and_an_older_one_is_refused(gateway: Served, node: FakeNode) -> None:
    async with held(gateway, node) as move:
        to = await destination(node, Teller(Script((TEXT,)), holding(2)))
        moved = await move.order(to.id, token=5)
        assert await move.order(to.id, token=5) == moved
        with pytest.raises(StaleToken):
            await move.order(move.source.id, token=4, migration="older", source_instance=to.id)
        with pytest.raises(Conflict, match="not on"):
            await move.order((await destination(node)).id, token=6, migration="late")
        # A newer order returns it to its source.
        move.source.behaviour = Teller(Script((TEXT,)))
        assert (await move.order(move.source.id, token=6, migration="back", source_instance=to.id)).tokens == HELD + 2
        await move.whole()


async def test_hand_off_continues_after_the_deadline_of_its_order(gateway: Served, node: FakeNode) -> None:
    """The source has stopped by then, and its last message is lost."""

    async def stop_silently(_: Run | None) -> Message:
        return Done()

    async with held(gateway, node) as move:
        move.source.yields = stop_silently
        to = await destination(node)
        with pytest.raises(DeadlineExceeded):
            await move.order(to.id, deadline_ms=300)
        assert (await move.order(to.id)).instance_id == to.id
        await move.whole()


async def test_only_one_of_two_concurrent_orders_is_carried_out(gateway: Served, node: FakeNode) -> None:
    async with held(gateway, node) as move:
        asked, release = asyncio.Event(), asyncio.Event()
        stop = move.source.yields
        assert stop is not None

        async def slow(run: Run | None) -> Message:
            asked.set()
            await release.wait()
            return await stop(run)

        move.source.yields = slow
        to, other = await destination(node), await destination(node)
        first = asyncio.create_task(move.order(to.id))
        await asked.wait()
        with pytest.raises(Conflict, match="in progress"):
            await move.order(other.id, token=2, migration="n")
        again = asyncio.create_task(move.order(to.id))  # the same order, repeated meanwhile
        release.set()
        assert (await again).instance_id == to.id
        await first
        await move.whole()
        assert other.requests == []


@pytest.mark.parametrize("error", [InstanceDraining(), InsufficientMemory("no room"), Conflict("other weights", param="resume")])
async def test_refusal_by_the_destination_is_invisible_to_the_client(gateway: Served, node: FakeNode, error: ThawError) -> None:
    async def refuse(run: Run) -> None:
        await run.fail(error)

    async with held(gateway, node) as move:
        move.source.behaviour = Teller(Script((TEXT,)))
        to = await destination(node, refuse)
        with pytest.raises(type(error)):
            await move.order(to.id)
        await move.whole()
        assert len(move.source.requests) == 2  # the source first


@pytest.mark.parametrize("tokens", [0, 3])
async def test_destination_that_dies_is_replaced(gateway: Served, node: FakeNode, tokens: int) -> None:
    """A destination that dies before or after its first token is replaced."""
    async with held(gateway, node) as move:
        move.source.behaviour = Teller(Script((TEXT,)))
        to = await destination(node, Teller(Script((TEXT,)), holding(tokens)))
        ordered = asyncio.create_task(move.order(to.id))
        await to.until(lambda: bool(to.requests) and to.requests[0].seq == tokens + 1)
        await die(node, to)
        if tokens:
            await ordered
        else:
            with pytest.raises(ThawError):
                await ordered
        await move.whole()


@pytest.mark.parametrize("dead", ["before", "asked", "mute"])
async def test_handover_completes_although_the_source_dies(
    gateway: Served, node: FakeNode, dead: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hand-off completes without a source that dies.

    It dies before the gateway asks it to stop, while it handles that, or without ever stopping.
    """
    monkeypatch.setattr(move_request, "YIELD_TIMEOUT_S", 0.3)
    async with held(gateway, node) as move:

        async def last_words(run: Run | None) -> Message:
            if dead == "asked":
                asyncio.get_running_loop().call_soon(lambda: asyncio.ensure_future(move.source.vanish()))
            return Done()

        move.source.yields = last_words
        to = await destination(node)
        if dead == "before":
            await move.source.vanish()
        assert (await move.order(to.id)).tokens == HELD
        await move.whole()


async def test_request_that_finishes_before_the_yield_is_not_moved(gateway: Served, node: FakeNode) -> None:
    release = asyncio.Event()
    async with held(gateway, node, release) as move:

        async def finish(run: Run | None) -> Message:
            release.set()
            await move.source.until(lambda: move.source.requests[0].seq == LENGTH + 2)
            return Failure(error=NotFound("it is over").body())

        move.source.yields = finish
        to = await destination(node)
        with pytest.raises(NotFound):
            await move.order(to.id)
        await move.whole()
        assert to.requests == []


async def test_client_disconnect_during_a_move_cancels_the_destination(gateway: Served, node: FakeNode) -> None:
    async with held(gateway, node) as move:
        to = await destination(node, Teller(Script((TEXT,)), holding(0)))
        ordered = asyncio.create_task(move.order(to.id))
        await to.until(lambda: len(to.requests) == 1)
        move.answer.cancel()
        with pytest.raises(NotFound):
            await ordered
        await to.until(lambda: to.cancelled == [to.requests[0].request.request_id])


async def test_request_that_cannot_be_moved_continues(gateway: Served, node: FakeNode) -> None:
    async with held(gateway, node) as move:
        other = await node.engine("beta")
        for to in ("nowhere", other.id):
            with pytest.raises(Conflict, match="ready"):
                await move.order(to)
        with pytest.raises(NotFound):
            await move.order(other.id, request_id="unknown-1")
        move.source.yields = refuse_to_stop
        with pytest.raises(Conflict, match="it has no such thing"):
            await move.order((await destination(node)).id)
        assert move.source.state is InstanceState.READY
        await die(node, move.source)  # and it is complete
        await move.whole()


async def refuse_to_stop(run: Run | None) -> Message:
    return Failure(error=Conflict("it has no such thing").body())


async def test_draining_source_does_not_get_its_request_back(gateway: Served, node: FakeNode) -> None:
    async with held(gateway, node) as move:
        move.source.behaviour = drain
        to = await destination(node, drain)
        with pytest.raises(InstanceDraining):
            await move.order(to.id)
        await destination(node)
        await move.whole()
