"""Balance TCP connections over several gateways, round robin.

A refused connection goes to the next gateway. The balancer knows nothing of HTTP. If a connection
to a gateway breaks, the balancer breaks the client's connection, so that the client's own retry
reaches another gateway.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
import threading
import time

from shared.ports import free_port

_CONNECT_WITHIN_S = 20.0
"""How long a client's connection waits while every gateway refuses."""
_RETRY_EVERY_S = 0.05
_CHUNK_BYTES = 65536


class Balancer:
    """Runs in a thread of its own until `close`.

    Attributes:
        port: Port on which it listens on loopback.
    """

    def __init__(self, gateways: dict[str, int]) -> None:
        """
        Args:
            gateways: port on loopback, by name.
        """
        self._gateways = gateways
        self._turn = itertools.count()
        self._owners: dict[int, str] = {}
        # None of the ephemeral range: clients of a server that had it before would still ask it.
        self._listener = socket.create_server(("127.0.0.1", free_port()), backlog=512)
        self.port: int = self._listener.getsockname()[1]
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="balancer", daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def gateway_of(self, client_port: int) -> str | None:
        """The gateway that serves the connection from this port of the client."""
        return self._owners.get(client_port)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._listener.close()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(asyncio.start_server(self._serve, sock=self._listener))
        self._loop.run_forever()
        server.close()
        left = asyncio.all_tasks(self._loop)
        for task in left:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        self._loop.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        client_port = writer.get_extra_info("peername")[1]
        with contextlib.suppress(OSError, asyncio.CancelledError):
            found = await self._connect(client_port)
            if found is not None:
                await _join((reader, writer), found)
        writer.close()

    async def _connect(self, client_port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter] | None:
        deadline = time.monotonic() + _CONNECT_WITHIN_S
        names = list(self._gateways)
        first = next(self._turn)
        while time.monotonic() < deadline:
            for i in range(len(names)):
                name = names[(first + i) % len(names)]
                try:
                    pair = await asyncio.open_connection("127.0.0.1", self._gateways[name])
                except OSError:
                    continue
                self._owners[client_port] = name
                return pair
            await asyncio.sleep(_RETRY_EVERY_S)
        return None


async def _join(
    client: tuple[asyncio.StreamReader, asyncio.StreamWriter], gateway: tuple[asyncio.StreamReader, asyncio.StreamWriter]
) -> None:
    """Copy both ways until one side ends; then both are closed, hard if one broke."""
    pumps = [asyncio.create_task(_pump(client[0], gateway[1])), asyncio.create_task(_pump(gateway[0], client[1]))]
    try:
        done, _ = await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        broke = any(p.exception() for p in done)
    finally:
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)
        gateway[1].close()
    if broke:
        client[1].transport.abort()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(_CHUNK_BYTES):
        writer.write(data)
        await writer.drain()
