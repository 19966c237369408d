"""Waiting for the first of several events, and ending tasks for certain."""

from __future__ import annotations

import asyncio


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
