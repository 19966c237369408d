"""A burst of messages does not block other tasks of a process's event loop."""

from __future__ import annotations

import asyncio

from tests.support.mesh_client import connected_mesh
from tests.support.servers import NatsServer

MESSAGES = 8_000
BODY = b"x" * 150


async def test_other_tasks_run_during_a_burst(nats_server: NatsServer) -> None:
    received = turn = longest = 0
    done = asyncio.Event()

    async def on_message(_: object) -> None:
        nonlocal received, turn, longest
        received, turn = received + 1, turn + 1
        longest = max(longest, turn)
        if received == MESSAGES:
            done.set()

    async def other_task() -> None:
        nonlocal turn
        while not done.is_set():
            turn = 0
            await asyncio.sleep(0)

    async with connected_mesh(nats_server) as receiver, connected_mesh(nats_server) as sender:
        await receiver.nc.subscribe("burst", cb=on_message)
        await receiver.flush()
        other = asyncio.create_task(other_task())
        # One thread: all messages are sent and in the receiver's socket buffer before the receiver
        # reads.
        for _ in range(MESSAGES):
            await sender.nc.publish("burst", BODY)
        await sender.flush()
        await asyncio.wait_for(done.wait(), 60)
        await other
        # Two reads of nats-py, 32 KiB each: one being parsed and one being handled.
        assert longest <= 2 * (32 << 10) // len(BODY), longest
