"""Reads that compile a grammar: results, errors, and the time-out."""

from __future__ import annotations

import asyncio
import threading
from functools import partial

import pytest

from services.engine.server.bounded_reads import BoundedReads


async def test_results_and_errors_reach_the_caller() -> None:
    reads, prepared = BoundedReads(60), list[int]()

    def fail() -> int:
        raise ValueError("no")

    assert await reads.run(lambda: len(prepared), prepare=lambda: prepared.append(1)) == 1
    with pytest.raises(ValueError, match="no"):
        await reads.run(fail, prepare=lambda: None)
    with pytest.raises(ValueError, match="no"):
        await reads.run(lambda: 1, prepare=fail)
    reads.close()


async def test_slow_read_times_out_and_later_reads_do_not_wait_for_it() -> None:
    reads, ended = BoundedReads(1.0), threading.Event()
    with pytest.raises(TimeoutError):
        await reads.run(ended.wait, prepare=lambda: None)
    assert await asyncio.wait_for(reads.run(lambda: 2, prepare=lambda: None), 60) == 2
    ended.set()
    reads.close()


async def test_reads_that_wait_behind_a_slow_one_run_after_its_time() -> None:
    reads, ended = BoundedReads(1.0), threading.Event()
    slow = asyncio.create_task(reads.run(ended.wait, prepare=lambda: None))
    waiting = [asyncio.create_task(reads.run(lambda: "done", prepare=lambda: None)) for _ in range(3)]
    with pytest.raises(TimeoutError):
        await slow
    async with asyncio.timeout(60):
        assert await asyncio.gather(*waiting) == ["done"] * 3
    ended.set()
    reads.close()


async def test_preparation_is_not_part_of_the_time() -> None:
    reads, go = BoundedReads(1.0), threading.Event()
    task = asyncio.create_task(reads.run(lambda: 3, prepare=lambda: go.wait(60)))
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asyncio.shield(task), 1.2)
    go.set()
    assert await task == 3
    reads.close()


async def test_slow_read_whose_caller_has_left_does_not_delay_later_ones() -> None:
    reads, begun, ended = BoundedReads(1.0), threading.Event(), threading.Event()

    def slow() -> None:
        begun.set()
        ended.wait(60)

    task = asyncio.create_task(reads.run(slow, prepare=lambda: None))
    assert await asyncio.to_thread(begun.wait, 30)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await asyncio.wait_for(reads.run(lambda: 2, prepare=lambda: None), 30) == 2
    ended.set()
    reads.close()


async def test_slow_read_whose_caller_left_while_it_was_prepared_is_bounded_too() -> None:
    reads, preparing, go, ended = BoundedReads(1.0), threading.Event(), threading.Event(), threading.Event()

    def prepare() -> None:
        preparing.set()
        go.wait(60)

    task = asyncio.create_task(reads.run(lambda: ended.wait(60), prepare=prepare))
    assert await asyncio.to_thread(preparing.wait, 30)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    go.set()
    assert await asyncio.wait_for(reads.run(lambda: 2, prepare=lambda: None), 30) == 2
    ended.set()
    reads.close()


async def test_read_whose_caller_left_before_its_turn_does_not_run() -> None:
    reads, begun, go = BoundedReads(60), threading.Event(), threading.Event()
    ran: list[int] = []

    def first() -> None:
        begun.set()
        go.wait(60)

    tasks = [asyncio.create_task(reads.run(work, prepare=lambda: None)) for work in (first, lambda: ran.append(1))]
    assert await asyncio.to_thread(begun.wait, 30)
    tasks[1].cancel()
    with pytest.raises(asyncio.CancelledError):
        await tasks[1]
    go.set()
    await tasks[0]
    assert await reads.run(lambda: 3, prepare=lambda: None) == 3
    assert ran == []
    reads.close()


async def test_abandoned_reads_that_still_run_are_bounded() -> None:
    reads, ended = BoundedReads(0.05), threading.Event()
    begun: list[int] = []

    def hang(number: int) -> None:
        begun.append(number)
        ended.wait()

    for number in range(6):
        with pytest.raises(TimeoutError):
            await reads.run(partial(hang, number), prepare=lambda: None)
    assert begun == [0, 1, 2, 3]
    ended.set()
    reads.close()


async def test_reads_continue_once_an_abandoned_one_has_ended() -> None:
    reads, ends = BoundedReads(1.0), [threading.Event() for _ in range(4)]
    for end in ends:
        with pytest.raises(TimeoutError):
            await reads.run(end.wait, prepare=lambda: None)
    waiting = asyncio.create_task(reads.run(lambda: "done", prepare=lambda: None))
    ends[2].set()
    assert await asyncio.wait_for(waiting, 60) == "done"
    for end in ends:
        end.set()
    reads.close()
