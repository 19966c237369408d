"""Engines that a zygote forks, and a long-running request."""

from __future__ import annotations

from typing import Any

from shared.contracts.engine import EngineExited, EngineForked, EngineStart
from shared.contracts.inference import InferChunk
from tests.support.engines import Stream, ZygoteClient

SLOW: dict[str, Any] = {"prompt": "abc", "max_tokens": 900, "temperature": 0, "ignore_eos": True}
"""A request that a test does not let end: a minute and a half while `Pace.slowed` holds."""
FINITE: dict[str, Any] = SLOW | {"max_tokens": 60}
"""A request that ends soon after the engine is not slowed any more, also on a busy machine."""


async def forked(client: ZygoteClient, start: EngineStart) -> int:
    client.send(start.model_dump_json().encode())
    reported = await hear_fork(client)
    assert reported.instance_id == start.instance_id
    return reported.pid


async def hear_fork(client: ZygoteClient) -> EngineForked:
    """Return the zygote's next answer.

    The zygote reports exits to all its clients: that of an engine which an earlier test has killed
    may arrive first.
    """
    while isinstance(reported := await client.hear(), EngineExited):
        pass
    assert isinstance(reported, EngineForked), reported
    return reported


async def exited(client: ZygoteClient, pid: int) -> int:
    while True:
        reported = await client.hear()
        if isinstance(reported, EngineExited) and reported.pid == pid:
            return reported.returncode


async def until_streaming(stream: Stream) -> None:
    await stream.until(lambda r: any(isinstance(m, InferChunk) for m in r))
