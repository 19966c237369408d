"""Handlers that the NATS client calls: their errors, order and number, and their end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from pydantic import SecretStr

from shared.contracts.base import Failure
from shared.errors import PayloadTooLarge, ThawError, Unreachable
from shared.messaging import Mesh, responders
from shared.settings import CommonSettings
from shared.tasks import end
from tests.support.asking import ASK, Answer, Ask
from tests.support.mesh_client import connected_mesh
from tests.support.servers import NatsServer

SUBJECT = "handlers.test"
WITHIN_S = 60.0


Handler = Callable[[Ask], Awaitable[Answer]]


class Slow:
    """A handler that answers once `proceed` is set."""

    def __init__(self) -> None:
        self.began: list[int] = []
        self.ended: list[int] = []
        self.cancelled: list[int] = []
        self.proceed, self.was_cancelled = asyncio.Event(), asyncio.Event()
        self._changed = asyncio.Condition()

    async def handle(self, ask: Ask) -> Answer:
        async with self._changed:
            self.began.append(ask.value)
            self._changed.notify_all()
        try:
            await self.proceed.wait()
        except asyncio.CancelledError:
            self.cancelled.append(ask.value)
            self.was_cancelled.set()
            raise
        async with self._changed:
            self.ended.append(ask.value)
            self._changed.notify_all()
        return Answer(value=ask.value)

    async def until(self, reached: Callable[[], bool]) -> None:
        async with asyncio.timeout(WITHIN_S), self._changed:
            await self._changed.wait_for(reached)


@pytest.fixture
def server(nats_server: NatsServer) -> CommonSettings:
    return CommonSettings(nats_url=SecretStr(nats_server.url))


@pytest.fixture
async def requester(nats_server: NatsServer) -> AsyncIterator[Mesh]:
    async with connected_mesh(nats_server) as requester:
        yield requester


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(responders, "_GRACE_S", 0.1)


def ask(mesh: Mesh, value: int, deadline_ms: int = 60_000) -> asyncio.Task[Answer]:
    return asyncio.create_task(mesh.request(SUBJECT, Ask(value=value, deadline_ms=deadline_ms), Answer))


@pytest.mark.parametrize("concurrent", [False, True], ids=["serial", "concurrent"])
@pytest.mark.parametrize("body", [b"", b"\xff", b"{", b"[]", b'{"kind": "ask"}'])
async def test_any_bytes_get_a_typed_error(mesh: Mesh, body: bytes, concurrent: bool) -> None:
    await mesh.respond(SUBJECT, ASK, Slow().handle, concurrent=concurrent).start()
    await mesh.flush()
    reply = await mesh.nc.request(SUBJECT, body, timeout=WITHIN_S)
    assert Failure.model_validate_json(reply.data).error.code == "invalid_request"


class LongAsk(Ask):
    text: str


@pytest.mark.parametrize("spare_bytes", [-1000, 100])
async def test_request_that_nats_would_not_take_is_an_error(mesh: Mesh, spare_bytes: int) -> None:
    """Headers count too: the server would close the connection for good."""
    slow = Slow()
    slow.proceed.set()
    await mesh.respond(SUBJECT, ASK, slow.handle).start()
    await mesh.flush()
    frame = len(LongAsk(value=1, text="").model_dump_json())
    asked = LongAsk(value=1, text="x" * (mesh.nc.max_payload - frame - spare_bytes))
    with pytest.raises(PayloadTooLarge):
        await mesh.request(SUBJECT, asked, Answer)
    assert (await ask(mesh, 2)).value == 2


async def test_message_without_a_reply_subject_is_handled(mesh: Mesh) -> None:
    slow = Slow()
    slow.proceed.set()
    await mesh.respond(SUBJECT, ASK, slow.handle).start()
    await mesh.flush()
    await mesh.publish(SUBJECT, Ask(value=1))
    await slow.until(lambda: slow.ended == [1])


async def test_serial_requests_are_handled_one_at_a_time_in_order(mesh: Mesh) -> None:
    slow = Slow()
    await mesh.respond(SUBJECT, ASK, slow.handle).start()
    await mesh.flush()
    asked = [ask(mesh, n) for n in range(20)]
    await slow.until(lambda: bool(slow.began))
    await mesh.flush()
    assert slow.began == [0]
    slow.proceed.set()
    assert [a.value for a in await asyncio.gather(*asked)] == slow.ended == list(range(20))


async def test_concurrent_handlers_are_limited(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(responders, "CONCURRENT_HANDLERS", 3)
    slow = Slow()
    await mesh.respond(SUBJECT, ASK, slow.handle, concurrent=True).start()
    await mesh.flush()
    asked = [ask(mesh, n) for n in range(8)]
    await slow.until(lambda: len(slow.began) == 3)
    await mesh.flush()
    assert slow.began == [0, 1, 2]
    slow.proceed.set()
    assert [a.value for a in await asyncio.gather(*asked)] == list(range(8))


async def test_handler_that_awaits_something_cancelled_does_not_end_its_subscription(mesh: Mesh) -> None:
    async def handle(ask: Ask) -> Answer:
        if ask.value == 0:
            cancelled = asyncio.get_running_loop().create_future()
            cancelled.cancel()
            await cancelled
        return Answer(value=ask.value)

    await mesh.respond(SUBJECT, ASK, handle).start()
    await mesh.flush()
    with pytest.raises(ThawError, match="cancelled"):
        await ask(mesh, 0)
    assert (await ask(mesh, 1)).value == 1


async def test_late_concurrent_handlers_are_cancelled(mesh: Mesh, impatient: None) -> None:
    slow = Slow()
    responder = mesh.respond(SUBJECT, ASK, slow.handle, concurrent=True)
    await responder.start()
    await mesh.flush()
    asked = [ask(mesh, n) for n in range(3)]
    await slow.until(lambda: len(slow.began) == 3)
    async with asyncio.timeout(WITHIN_S):
        await responder.stop()
    assert sorted(slow.cancelled) == [0, 1, 2]
    with pytest.raises(Unreachable):
        await ask(mesh, 3)
    await end(*asked)


async def test_requests_that_wait_for_a_free_handler_are_not_begun_after_a_stop(
    mesh: Mesh, impatient: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(responders, "CONCURRENT_HANDLERS", 2)
    slow = Slow()
    responder = mesh.respond(SUBJECT, ASK, slow.handle, concurrent=True)
    await responder.start()
    await mesh.flush()
    asked = [ask(mesh, n) for n in range(6)]
    await slow.until(lambda: len(slow.began) == 2)
    await mesh.flush()
    async with asyncio.timeout(WITHIN_S):
        await responder.stop()
    assert slow.began == [0, 1]
    assert not mesh._responders
    await end(*asked)


async def test_serial_handler_that_outlasts_a_stop_continues_to_its_end(mesh: Mesh, impatient: None) -> None:
    slow = Slow()
    responder = mesh.respond(SUBJECT, ASK, slow.handle)
    await responder.start()
    await mesh.flush()
    asked = [ask(mesh, n) for n in range(2)]
    await slow.until(lambda: slow.began == [0])
    await responder.stop()
    assert not slow.cancelled
    with pytest.raises(Unreachable):
        await ask(mesh, 2)
    slow.proceed.set()
    assert [a.value for a in await asyncio.gather(*asked)] == slow.ended == [0, 1]
    assert not mesh._responders


@pytest.mark.parametrize("concurrent", [False, True], ids=["serial", "concurrent"])
async def test_closing_a_connection_cancels_late_handlers(
    server: CommonSettings, requester: Mesh, impatient: None, concurrent: bool
) -> None:
    slow = Slow()
    closing = Mesh(server, "closing")
    closing.respond(SUBJECT, ASK, slow.handle, concurrent=concurrent)
    await closing.start()
    await closing.flush()
    asked = ask(requester, 0)
    await slow.until(lambda: slow.began == [0])
    async with asyncio.timeout(WITHIN_S):
        await closing.stop()
        await slow.was_cancelled.wait()
    await end(asked)


@pytest.mark.parametrize("concurrent", [False, True], ids=["serial", "concurrent"])
async def test_a_cancelled_stop_continues(mesh: Mesh, concurrent: bool) -> None:
    slow = Slow()
    responder = mesh.respond(SUBJECT, ASK, slow.handle, concurrent=concurrent)
    await responder.start()
    await mesh.flush()
    asked = ask(mesh, 0)
    await slow.until(lambda: slow.began == [0])
    stopping = asyncio.create_task(responder.stop())
    await asyncio.sleep(0)
    stopping.cancel()
    slow.proceed.set()
    assert (await asked).value == 0
    async with asyncio.timeout(WITHIN_S):
        await responder.stop()
    assert not mesh._responders


async def test_responder_stopped_before_the_connection_receives_nothing(server: CommonSettings) -> None:
    mesh = Mesh(server, "early")
    responder = mesh.respond(SUBJECT, ASK, Slow().handle)
    await responder.stop()
    await mesh.start()
    try:
        with pytest.raises(Unreachable):
            await ask(mesh, 0)
    finally:
        await mesh.stop()


@pytest.mark.parametrize("concurrent", [False, True], ids=["serial", "concurrent"])
async def test_handlers_run_in_the_trace_of_their_request(mesh: Mesh, concurrent: bool) -> None:
    traced: list[int] = []

    async def handle(ask: Ask) -> Answer:
        traced.append(trace.get_current_span().get_span_context().trace_id)
        return Answer(value=ask.value)

    await mesh.respond(SUBJECT, ASK, handle, concurrent=concurrent).start()
    await mesh.flush()
    with TracerProvider().get_tracer("test").start_as_current_span("request") as span:
        await mesh.request(SUBJECT, Ask(value=1), Answer)
    await mesh.request(SUBJECT, Ask(value=2), Answer)
    assert traced == [span.get_span_context().trace_id, 0]
