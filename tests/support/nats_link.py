"""A connection between a process and NATS that a test cuts and opens again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tests.support.servers import NatsServer, kept_port


class Link:
    """A TCP connection to NATS that can be cut."""

    def __init__(self, nats: NatsServer) -> None:
        self._kept = kept_port()
        self.port: int = self._kept.getsockname()[1]
        self.url = f"nats://127.0.0.1:{self.port}"
        self._nats = nats
        self._server: asyncio.Server | None = None
        self._writers: list[asyncio.StreamWriter] = []

    async def open(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", self.port)

    async def cut(self) -> None:
        assert self._server is not None
        self._server.close()
        for writer in self._writers:
            writer.transport.abort()
        await self._server.wait_closed()

    def release_port(self) -> None:
        """Let other processes use the port. The connection stays cut."""
        self._kept.close()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, here = await asyncio.open_connection("127.0.0.1", self._nats.port)
        self._writers += [writer, here]
        await asyncio.gather(_copy(reader, here), _copy(there, writer))


async def _copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    try:
        while data := await source.read(65536):
            target.write(data)
            await target.drain()
    except OSError:
        pass  # cut
    finally:
        target.close()


@asynccontextmanager
async def linked(nats: NatsServer) -> AsyncIterator[Link]:
    link = Link(nats)
    await link.open()
    try:
        yield link
    finally:
        await link.cut()
        link.release_port()
