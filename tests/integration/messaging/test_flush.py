"""Cancelled flushes: the late reply must not end the reader of the connection.

A shutdown continues without the reply.
"""

from __future__ import annotations

import asyncio
import logging

import psutil
import pytest
from pydantic import SecretStr

from shared.messaging import Mesh
from shared.settings import CommonSettings
from tests.support.servers import NatsServer
from tests.support.stopping import stop


async def test_messages_arrive_after_a_flush_was_cancelled(mesh: Mesh) -> None:
    answered = mesh.nc._pongs_received
    flush = asyncio.create_task(mesh.flush())
    async with asyncio.timeout(60):
        while not mesh.nc._pongs:  # noqa: ASYNC110 - the ping is out; nats-py has no event for it
            await asyncio.sleep(0)
    flush.cancel()
    await asyncio.gather(flush, return_exceptions=True)
    await mesh.flush()
    assert mesh.nc._pongs_received >= answered + 2, "the cancelled flush was answered too"
    subscription = await mesh.nc.subscribe("greeting.flush")
    await mesh.nc.publish("greeting.flush", b"hello")
    assert (await subscription.next_msg(timeout=60)).data == b"hello"


async def test_stop_succeeds_if_the_server_does_not_respond(own_nats: NatsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = Mesh(CommonSettings(nats_url=SecretStr(own_nats.url)), "test")
    await asyncio.wait_for(mesh.start(), 60)
    client, warned = mesh.nc, asyncio.Event()
    monkeypatch.setattr(logging.getLogger("shared.messaging.mesh"), "warning", lambda *_, **__: warned.set())
    launcher = psutil.Process(own_nats.process.pid)
    server = [launcher, *launcher.children(recursive=True)]  # the wheel's program starts the server
    try:
        stop(*(process.pid for process in server))
        stopping = asyncio.create_task(mesh.stop())
        await asyncio.wait_for(warned.wait(), 60)
    finally:
        for process in server:
            process.resume()
    await asyncio.wait_for(stopping, 60)
    assert client.is_closed
