"""Requests with reports of progress: slow replies arrive, lost requests end soon."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from nats.aio.msg import Msg
from pydantic import TypeAdapter

from shared.contracts.admin import ClusterView, ViewCluster
from shared.contracts.base import Done
from shared.errors import DeadlineExceeded, ReplyLost, Unreachable
from shared.messaging import Mesh, progress
from tests.support.mesh_client import connected_mesh
from tests.support.servers import NatsServer

SUBJECT = "test.progress"
LONG = ViewCluster(deadline_ms=60_000)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_REPORTS_EVERY_S", 0.1)
    monkeypatch.setattr(progress, "_SILENT_S", 5.0)  # the server of a busy machine may not run for seconds


@pytest.fixture
async def may_reply(nats_server: NatsServer) -> AsyncIterator[asyncio.Event]:
    """Start a responder that replies once the event is set."""
    ready = asyncio.Event()

    async def reply(_: ViewCluster) -> Done:
        await ready.wait()
        return Done()

    async with connected_mesh(nats_server) as responder:
        await responder.respond(SUBJECT, TypeAdapter(ViewCluster), reply, concurrent=True).start()
        await responder.flush()
        yield ready
        ready.set()


async def test_reply_slower_than_the_silence_limit_is_received(mesh: Mesh, may_reply: asyncio.Event) -> None:
    asked = asyncio.create_task(mesh.request(SUBJECT, LONG, Done, with_reports=True))
    loop = asyncio.get_running_loop()
    loop.call_later(progress._SILENT_S * 1.2, may_reply.set)
    assert await asked == Done()


async def test_request_fails_if_its_responder_stops_reporting(mesh: Mesh) -> None:
    async def report_for_a_while(message: Msg) -> None:
        for _ in range(3):
            await mesh.nc.publish(message.reply, headers={progress._HEADER: "working"})
            await asyncio.sleep(0.1)

    await mesh.nc.subscribe("test.ends", cb=report_for_a_while)
    async with asyncio.timeout(60):
        with pytest.raises(ReplyLost, match="repeat it"):
            await mesh.request("test.ends", LONG, ClusterView, with_reports=True)


async def test_request_lost_by_nats_fails(mesh: Mesh, nats_server: NatsServer) -> None:
    async def lose(_: object) -> None:
        pass

    await mesh.nc.subscribe("test.lost", cb=lose)
    async with asyncio.timeout(60):
        with pytest.raises(ReplyLost, match="NATS lost the request"):
            await mesh.request("test.lost", LONG, ClusterView, with_reports=True)


async def test_request_without_a_subscriber_fails_immediately(mesh: Mesh) -> None:
    with pytest.raises(Unreachable, match="No process answers"):
        await mesh.request("test.unsubscribed", LONG, ClusterView, with_reports=True)


async def test_deadline_applies_while_reports_arrive(mesh: Mesh, may_reply: asyncio.Event) -> None:
    with pytest.raises(DeadlineExceeded, match="within"):
        await mesh.request(SUBJECT, ViewCluster(deadline_ms=500), Done, with_reports=True)


async def test_subscription_ends_with_its_request(mesh: Mesh, may_reply: asyncio.Event) -> None:
    may_reply.set()
    before = len(mesh.nc._subs)
    for _ in range(3):
        assert await mesh.request(SUBJECT, LONG, Done, with_reports=True) == Done()
    assert len(mesh.nc._subs) == before
