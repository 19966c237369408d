"""The end of a container, as its host sees it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

from services.enginehost.http1 import Address, Client, HttpRequest
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


class Log:
    """A container engine that sends a log in pieces."""

    status, headers = 200, dict[str, str]()

    def __init__(self, pieces: list[bytes]) -> None:
        self._pieces = pieces

    async def send(self, _: HttpRequest) -> Log:
        return self

    async def read(self) -> bytes:
        return self._pieces.pop(0) if self._pieces else b""

    def close(self) -> None:
        """No connection."""


async def lines_of(pieces: list[bytes]) -> list[bytes]:
    docker = Docker(Path("unused"))
    docker._client = cast(Client, Log(pieces))
    return [line async for line in docker.logs("c")]


def frame(line: bytes) -> bytes:
    return b"\x01\0\0\0" + len(line).to_bytes(4, "big") + line


async def test_log_may_be_cut_anywhere() -> None:
    whole = frame(b"one\n") + frame(b"") + frame(b"three\n")
    for cut in range(1, len(whole)):
        assert await lines_of([whole[:cut], whole[cut:]]) == [b"one\n", b"", b"three\n"]


async def test_time_of_a_burst_of_lines_grows_with_their_number() -> None:
    """The event loop relays responses meanwhile."""

    async def measure(lines: int) -> float:
        begun = time.process_time()
        assert len(await lines_of([frame(b"x") * lines])) == lines
        return time.process_time() - begun

    few = min([await measure(4_000) for _ in range(3)])
    assert await measure(64_000) < 64 * few  # 16 times in proportion, 256 times with a copy for each line
