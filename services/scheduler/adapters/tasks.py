"""Ending tasks for certain."""

from __future__ import annotations

import asyncio


async def end(*tasks: asyncio.Task[object], again_s: float = 1.0) -> None:
    """Cancel `tasks` and wait until they are over, asking again every `again_s` seconds.

    Once is not enough: `asyncio.wait_for` before Python 3.12, and with it a request of the NATS client, swallows a cancellation that
    comes together with the answer.
    """
    left = {t for t in tasks if not t.done()}
    while left:
        for task in left:
            task.cancel()
        _, left = await asyncio.wait(left, timeout=again_s)
