"""Mesh client: typed replies, errors over NATS, deadlines, prompt `Unreachable`."""

from __future__ import annotations

import asyncio
from typing import Literal

import pytest

from shared.contracts import subjects
from shared.contracts.base import Request
from shared.contracts.loader import LoaderStatus
from shared.errors import DeadlineExceeded, InvalidRequest, ModelNotFound, ThawError, Unreachable
from shared.messaging import Mesh
from tests.support.asking import ASK, Answer, Ask


async def serve(mesh: Mesh, subject: str, *, concurrent: bool = False) -> None:
    async def handle(ask: Ask) -> Answer:
        if ask.value < 0:
            raise ModelNotFound(f"no model {ask.value}", param="model")
        if ask.value == 0:
            raise ZeroDivisionError("zero")
        if ask.value > 100:
            await asyncio.Event().wait()
        return Answer(value=ask.value + 1)

    await mesh.respond(subject, ASK, handle, concurrent=concurrent).start()


async def test_request_receives_its_typed_reply(mesh: Mesh) -> None:
    await serve(mesh, "t.reply")
    assert (await mesh.request("t.reply", Ask(value=1), Answer)).value == 2


async def test_error_keeps_its_class_and_fields(mesh: Mesh) -> None:
    await serve(mesh, "t.error")
    with pytest.raises(ModelNotFound, match="no model -3") as caught:
        await mesh.request("t.error", Ask(value=-3), Answer)
    assert caught.value.param == "model"


async def test_an_unexpected_exception_is_an_answer_too(mesh: Mesh) -> None:
    await serve(mesh, "t.bug")
    with pytest.raises(ThawError, match="ZeroDivisionError"):
        await mesh.request("t.bug", Ask(value=0), Answer)


async def test_malformed_requests_are_answered(mesh: Mesh) -> None:
    await serve(mesh, "t.malformed")

    class Wrong(Request):
        kind: Literal["wrong"] = "wrong"
        value: str = "a prompt, or a key"

    with pytest.raises(InvalidRequest, match=r"kind: .*; value: ") as caught:
        await mesh.request("t.malformed", Wrong(), Answer)
    assert "a prompt" not in caught.value.message


async def test_missing_responder_is_reported_immediately(mesh: Mesh) -> None:
    with pytest.raises(Unreachable):
        await asyncio.wait_for(mesh.request("t.unsubscribed", Ask(value=1, deadline_ms=60_000), Answer), 30)


async def test_deadline_ends_the_handler_and_is_reported(mesh: Mesh) -> None:
    await serve(mesh, "t.deadline")
    with pytest.raises(DeadlineExceeded):
        await mesh.request("t.deadline", Ask(value=101, deadline_ms=100), Answer)
    assert (await mesh.request("t.deadline", Ask(value=1), Answer)).value == 2


async def test_concurrent_handlers_do_not_wait_for_each_other(mesh: Mesh) -> None:
    await serve(mesh, "t.concurrent", concurrent=True)
    slow = asyncio.create_task(mesh.request("t.concurrent", Ask(value=101, deadline_ms=3000), Answer))
    assert (await mesh.request("t.concurrent", Ask(value=1), Answer)).value == 2
    slow.cancel()


@pytest.mark.parametrize("concurrent", [True, False])
async def test_request_to_a_stopping_responder_is_answered_or_unreachable(mesh: Mesh, concurrent: bool) -> None:
    received = asyncio.Event()
    proceed = asyncio.Event()

    async def handle(ask: Ask) -> Answer:
        received.set()
        await proceed.wait()
        return Answer(value=ask.value)

    subject = f"t.stopping.{concurrent}"
    responder = mesh.respond(subject, ASK, handle, concurrent=concurrent)
    await responder.start()
    before = [asyncio.create_task(mesh.request(subject, Ask(value=n), Answer)) for n in range(3)]
    await received.wait()
    await mesh.flush()
    stopping = asyncio.create_task(responder.stop())
    late = []
    for n in range(3, 9):
        await mesh.flush()
        late.append(asyncio.create_task(mesh.request(subject, Ask(value=n), Answer)))
    await mesh.flush()
    proceed.set()
    assert [a.value for a in await asyncio.gather(*before)] == [0, 1, 2]
    assert all(isinstance(a, Answer | Unreachable) for a in await asyncio.gather(*late, return_exceptions=True))
    await stopping


@pytest.mark.parametrize("concurrent", [True, False])
async def test_requests_that_arrive_during_a_stop_are_answered(mesh: Mesh, concurrent: bool) -> None:
    async def handle(ask: Ask) -> Answer:
        return Answer(value=ask.value)

    for moment in range(12):
        subject = f"t.moment.{concurrent}.{moment}"
        responder = mesh.respond(subject, ASK, handle, concurrent=concurrent)
        await responder.start()
        await mesh.flush()
        asked = [asyncio.create_task(mesh.request(subject, Ask(value=n), Answer)) for n in range(5)]
        for _ in range(moment):
            await asyncio.sleep(0)
        await responder.stop()
        assert all(isinstance(a, Answer | Unreachable) for a in await asyncio.gather(*asked, return_exceptions=True)), moment


async def test_events_arrive_in_order(mesh: Mesh) -> None:
    received: list[int] = []
    done = asyncio.Event()

    async def hear(event: Answer) -> None:
        received.append(event.value)
        if event.value == 99:
            done.set()

    await mesh.listen("t.events", Answer, hear).start()
    await mesh.flush()
    for i in range(100):
        await mesh.publish("t.events", Answer(value=i))
    await asyncio.wait_for(done.wait(), 60)
    assert received == list(range(100))


async def test_a_status_in_another_nodes_name_is_dropped(mesh: Mesh) -> None:
    """A status that names another node than its subject does is dropped.

    NATS restricts a node to its own subjects, but does not check the message bodies.
    """
    received: list[str] = []
    done = asyncio.Event()

    async def hear(status: LoaderStatus) -> None:
        received.append(f"{status.node} {status.boot_id}")
        if status.boot_id == "last":
            done.set()

    await mesh.listen(subjects.ALL_LOADER_STATUS, LoaderStatus, hear).start()
    await mesh.flush()
    await mesh.publish(subjects.loader_status("node-0"), LoaderStatus(node="node-0", boot_id="b"))
    await mesh.publish(subjects.loader_status("node-1"), LoaderStatus(node="node-0", boot_id="forged"))
    await mesh.publish(subjects.loader_status("node-1"), LoaderStatus(node="node-1", boot_id="last"))
    await asyncio.wait_for(done.wait(), 60)
    assert received == ["node-0 b", "node-1 last"]
