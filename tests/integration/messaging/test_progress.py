"""Requests with reports of progress: slow replies arrive, lost requests end soon."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from nats.aio.msg import Msg
from pydantic import SecretStr, TypeAdapter

from shared.contracts.admin import ClusterView, ViewCluster
from shared.contracts.base import Done
from shared.errors import DeadlineExceeded, ReplyLost, Unreachable
from shared.messaging import Mesh, progress
from shared.settings import CommonSettings
from tests.support.servers import NatsServer

SUBJECT = "test.progress"
LONG = ViewCluster(deadline_ms=60_000)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_REPORTS_EVERY_S", 0.1)
    monkeypatch.setattr(progress, "_SILENT_S", 2.0)


@pytest.fixture
async def requester(nats_server: NatsServer) -> AsyncIterator[Mesh]:
    mesh = Mesh(CommonSettings(nats_url=SecretStr(nats_server.url)), "requester")
    await mesh.start()
    yield mesh
    await mesh.stop()


@pytest.fixture
async def responder(nats_server: NatsServer) -> AsyncIterator[tuple[Mesh, asyncio.Event]]:
    """Reply once the event is set."""
    mesh = Mesh(CommonSettings(nats_url=SecretStr(nats_server.url)), "responder")
    ready = asyncio.Event()

    async def reply(_: ViewCluster) -> Done:
        await ready.wait()
        return Done()

    mesh.respond(SUBJECT, TypeAdapter(ViewCluster), reply, concurrent=True)
    await mesh.start()
    await mesh.flush()
    yield mesh, ready
    ready.set()
    await mesh.stop()


async def test_reply_slower_than_the_silence_limit_is_received(requester: Mesh, responder: tuple[Mesh, asyncio.Event]) -> None:
    asked = asyncio.create_task(requester.request(SUBJECT, LONG, Done, with_reports=True))
    loop = asyncio.get_running_loop()
    loop.call_later(progress._SILENT_S * 2, responder[1].set)
    assert await asked == Done()


async def test_request_fails_if_its_responder_stops_reporting(requester: Mesh) -> None:
    async def report_for_a_while(message: Msg) -> None:
        for _ in range(3):
            await requester.nc.publish(message.reply, headers={progress._HEADER: "working"})
            await asyncio.sleep(0.1)

    await requester.nc.subscribe("test.ends", cb=report_for_a_while)
    async with asyncio.timeout(60):
        with pytest.raises(ReplyLost, match="repeat it"):
            await requester.request("test.ends", LONG, ClusterView, with_reports=True)


async def test_request_lost_by_nats_fails(requester: Mesh, nats_server: NatsServer) -> None:
    async def lose(_: object) -> None:
        pass

    await requester.nc.subscribe("test.lost", cb=lose)
    async with asyncio.timeout(60):
        with pytest.raises(ReplyLost, match="NATS lost the request"):
            await requester.request("test.lost", LONG, ClusterView, with_reports=True)


async def test_request_without_a_subscriber_fails_immediately(requester: Mesh) -> None:
    with pytest.raises(Unreachable, match="No process answers"):
        await requester.request("test.unsubscribed", LONG, ClusterView, with_reports=True)


async def test_deadline_applies_while_reports_arrive(requester: Mesh, responder: tuple[Mesh, asyncio.Event]) -> None:
    with pytest.raises(DeadlineExceeded, match="within"):
        await requester.request(SUBJECT, ViewCluster(deadline_ms=500), Done, with_reports=True)


async def test_subscription_ends_with_its_request(requester: Mesh, responder: tuple[Mesh, asyncio.Event]) -> None:
    responder[1].set()
    before = len(requester.nc._subs)
    for _ in range(3):
        assert await requester.request(SUBJECT, LONG, Done, with_reports=True) == Done()
    assert len(requester.nc._subs) == before
