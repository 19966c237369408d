"""Tasks end, however they handle a cancellation."""

from __future__ import annotations

import asyncio

from shared.tasks import end


async def test_task_that_swallows_cancellations_is_cancelled_again_until_it_ends() -> None:
    swallowed = 0

    async def stubborn() -> None:
        nonlocal swallowed
        while True:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                swallowed += 1
                if swallowed == 3:
                    raise

    task = asyncio.create_task(stubborn())
    await asyncio.sleep(0)
    await end(task, again_s=0.01)
    assert task.cancelled()
    assert swallowed == 3


async def test_ending_a_failed_task_keeps_its_exception() -> None:
    async def fail() -> None:
        raise OSError

    task = asyncio.create_task(fail())
    await asyncio.wait([task])
    await end(task)
    assert isinstance(task.exception(), OSError)
