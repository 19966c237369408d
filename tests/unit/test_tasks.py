"""Tasks end, however they handle a cancellation."""

from __future__ import annotations

import asyncio

import pytest

from shared.tasks import end, run_within


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


async def test_work_within_its_time_returns_its_result_and_other_work_is_cancelled() -> None:
    ended = asyncio.Event()

    async def work(result: int) -> int:
        try:
            if not result:
                await asyncio.Event().wait()
            return result
        finally:
            ended.set()

    assert await run_within(60.0, work(7)) == 7
    ended.clear()
    with pytest.raises(TimeoutError):
        await run_within(0.03, work(0), tick_s=0.01)
    assert ended.is_set()
