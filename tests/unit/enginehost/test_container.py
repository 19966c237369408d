"""The end of a container, as its host sees it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

from services.enginehost.http1 import Address
from services.enginehost.runtimes.container import EngineContainer
from services.enginehost.runtimes.docker import Docker


class ExitedContainer:
    """A container engine with one container, which has exited with status 3."""

    async def wait(self, _: str) -> int:
        return 3

    async def inspect(self, _: str) -> dict[str, Any]:
        return {"State": {"OOMKilled": False}}

    async def logs(self, _: str) -> AsyncIterator[bytes]:
        yield b"a line\n"


async def test_end_is_noticed_although_the_log_cannot_be_written(tmp_path: Path) -> None:
    container = EngineContainer(cast(Docker, ExitedContainer()), "c", 0, Address(), tmp_path / "missing" / "i.engine.log")
    async with asyncio.timeout(30):
        ended = await container.wait()
    assert ended.returncode == 3
