"""Timers of the tests' event loops do not count pauses of the process."""

from __future__ import annotations

import asyncio
import time

from tests.support.pauses import PAUSED_S


async def test_a_reply_that_arrives_during_a_pause_is_received_before_its_deadline() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(await reader.read(1))
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        writer.write(b"x")
        asking = asyncio.create_task(asyncio.wait_for(reader.read(1), 4 * PAUSED_S))
        await asyncio.sleep(0)
        time.sleep(8 * PAUSED_S)  # noqa: ASYNC251 - the pause
        assert await asking == b"x"
        writer.close()


async def test_a_wait_takes_its_time() -> None:
    loop = asyncio.get_running_loop()
    began, looped = time.monotonic(), loop.time()
    await asyncio.sleep(2 * PAUSED_S)
    assert time.monotonic() - began >= 2 * PAUSED_S
    assert loop.time() - looped >= 2 * PAUSED_S


async def test_time_in_which_code_computes_on_the_loop_counts() -> None:
    loop = asyncio.get_running_loop()
    looped, ends = loop.time(), time.thread_time() + 4 * PAUSED_S
    while time.thread_time() < ends:
        pass
    assert loop.time() - looped >= 4 * PAUSED_S
