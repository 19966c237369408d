"""Adoption over a half-open connection to NATS: its bytes are lost, and it stays open."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

from shared.contracts import subjects
from shared.contracts.node import InstanceState
from tests.integration.nodeagent.harness import begin_request, running_node
from tests.support.servers import NatsServer

ADOPT_S = 8
"""Less than the time in which the client of NATS notices a half-open connection."""


class Relay:
    """Forwards connections to NATS. The one that carries `fatal` first loses all that follows."""

    def __init__(self, nats: NatsServer, fatal: bytes) -> None:
        self.url = ""
        self.lost = asyncio.Event()
        self._nats = nats
        self._fatal = fatal

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        async with await asyncio.start_server(self._accept, "127.0.0.1", 0) as server:
            self.url = f"nats://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            yield

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, here = await asyncio.open_connection("127.0.0.1", self._nats.port)
        is_half_open = asyncio.Event()
        copies = (self._copy(reader, here, is_half_open), self._copy(there, writer, is_half_open))
        try:
            await asyncio.gather(*copies)
        finally:
            here.close()
            writer.close()

    async def _copy(self, source: asyncio.StreamReader, target: asyncio.StreamWriter, is_half_open: asyncio.Event) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(1 << 16):
                if self._fatal in data and not self.lost.is_set():
                    self.lost.set()
                    is_half_open.set()
                if not is_half_open.is_set():
                    target.write(data)
            target.close()


async def test_engines_are_adopted_if_the_agents_connection_is_half_open(nats_server: NatsServer, tmp_path: Path) -> None:
    async with running_node(nats_server.url, tmp_path, THAW_ADOPT_TIMEOUT=str(ADOPT_S)) as node:
        instance_id = await node.start()
        pids = (await node.reaches(instance_id, InstanceState.READY)).pids
        node.kill_agent()
        relay = Relay(nats_server, subjects.engine_control(instance_id).encode())
        async with relay.serving():
            node.environment["THAW_NATS_URL"] = relay.url
            (adopted,) = (await node.start_agent()).instances
            assert relay.lost.is_set()
            assert (adopted.state, adopted.pids) == (InstanceState.READY, pids)
            await begin_request(node, instance_id)  # its report ends the adoption
            node.close()
