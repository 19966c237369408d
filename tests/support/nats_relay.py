"""A relay between a process and NATS, which breaks connections as a test says."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Literal

from tests.support.servers import NatsServer


class NatsRelay:
    """Forwards connections to a NATS server.

    Attributes:
        up: While it is not set, connections stay open and forward nothing.
        broken: Set once `break_at` has broken a connection.
        connections: The number of connections so far.
        url: Of NATS behind the relay.
    """

    def __init__(self, nats: NatsServer) -> None:
        self.up = asyncio.Event()
        self.up.set()
        self.broken = asyncio.Event()
        self.connections = 0
        self.url = ""
        self._nats = nats
        self._break: tuple[bytes, Literal["close", "lose"]] | None = None

    def break_at(self, text: bytes, how: Literal["close", "lose"]) -> None:
        """Break the connection that next carries `text`.

        Args:
            how: "close" it, or "lose" all that follows, while it stays open.
        """
        self._break = text, how

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        async with await asyncio.start_server(self._accept, "127.0.0.1", 0) as server:
            self.url = f"nats://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            yield
            self.up.set()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        there, here = await asyncio.open_connection("127.0.0.1", self._nats.port)
        is_half_open = asyncio.Event()
        try:
            await asyncio.gather(self._copy(reader, here, is_half_open), self._copy(there, writer, is_half_open))
        finally:
            here.close()
            writer.close()

    async def _copy(self, source: asyncio.StreamReader, target: asyncio.StreamWriter, is_half_open: asyncio.Event) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(1 << 16):
                await self.up.wait()
                if self._break is not None and self._break[0] in data:
                    _, how = self._break
                    self._break = None
                    self.broken.set()
                    if how == "close":
                        break
                    is_half_open.set()
                if not is_half_open.is_set():
                    target.write(data)
                    await target.drain()
        target.close()
