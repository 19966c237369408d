"""A flush that is given up: its answer still comes, and must not end what reads the connection."""

from __future__ import annotations

import asyncio

from pydantic import SecretStr

from shared.messaging import Mesh
from shared.settings import CommonSettings
from tests.support.servers import NatsServer


async def test_messages_arrive_after_a_flush_was_cancelled(nats_server: NatsServer) -> None:
    mesh = Mesh(CommonSettings(nats_url=SecretStr(nats_server.url)), "test")
    await asyncio.wait_for(mesh.start(), 15)
    try:
        answered = mesh.nc._pongs_received
        flush = asyncio.create_task(mesh.flush())
        async with asyncio.timeout(5):
            while not mesh.nc._pongs:  # noqa: ASYNC110 - the ping is out; nats-py has no event for it
                await asyncio.sleep(0)
        flush.cancel()
        await asyncio.gather(flush, return_exceptions=True)
        await mesh.flush()
        assert mesh.nc._pongs_received >= answered + 2, "the cancelled flush was answered too"
        heard = await mesh.nc.subscribe("greeting.flush")
        await mesh.nc.publish("greeting.flush", b"hello")
        assert (await heard.next_msg(timeout=5)).data == b"hello"
    finally:
        await mesh.stop()
