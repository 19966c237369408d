"""Waiting for the first of several events, and ending tasks for certain."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


async def wait_for_first(*events: asyncio.Event) -> None:
    """Wait until one of them is set."""
    waits = [asyncio.create_task(event.wait(), name="wait") for event in events]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()


async def end(*tasks: asyncio.Task[object], again_s: float = 1.0) -> None:
    """Cancel `tasks` and wait for their end; repeat the cancellation.

    One cancellation is not enough: `asyncio.wait_for` before Python 3.12, and with it connecting to
    NATS or a request of its client, swallows a cancellation that arrives together with the answer.
    A task group, or `asyncio.gather`, would then wait for ever.

    Args:
        again_s: Seconds between cancellations; longer than the cleanup of the tasks takes.
    """
    left = {t for t in tasks if not t.done()}
    while left:
        for task in left:
            task.cancel()
        _, left = await asyncio.wait(left, timeout=again_s)


async def run_within(within_s: float, work: Coroutine[Any, Any, T], tick_s: float = 1.0) -> T:
    """Return the result of `work`, or raise `TimeoutError` after `within_s` seconds.

    The limit is counted in ticks: after a pause of this process or machine, in which `work` could
    not continue either, only one tick is over.
    """
    task = asyncio.create_task(work)
    try:
        left_s = within_s
        while left_s > 0:
            done, _ = await asyncio.wait((task,), timeout=min(tick_s, left_s))
            if done:
                return task.result()
            left_s -= tick_s
        raise TimeoutError
    finally:
        await end(task)
