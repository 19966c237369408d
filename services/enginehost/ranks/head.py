"""The first rank's side: it publishes its address, and keeps a connection to the host of each other
rank.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket

from nats.errors import Error as NatsError

from services.enginehost.ranks.connection import CLOSING, LINE_BYTES, READY, NotProven, accept_member, write_line
from shared.contracts import subjects
from shared.contracts.stages import Stage, StageListening
from shared.engines.peer_sockets import configure
from shared.errors import EngineFailed
from shared.messaging import Mesh
from shared.ports import free_port
from shared.tasks import end

log = logging.getLogger(__name__)
_AGAIN_S = 1.0


def own_address(stage_host: str) -> str:
    """Return the address that other nodes use for this one, by the setting `stage_host`."""
    return socket.gethostname() if stage_host in ("0.0.0.0", "::") else stage_host


class RankHead:
    """Connections to the hosts of the other ranks. Runs on the event loop.

    Args:
        mesh: A connected mesh.
        stage: The first rank's place in its group.
        host: Address to listen on, which the other nodes reach.
    """

    def __init__(self, mesh: Mesh, stage: Stage, host: str) -> None:
        self._mesh, self._stage, self._host = mesh, stage, host
        self._server: asyncio.Server | None = None
        self._publishing: asyncio.Task[None] | None = None
        self._members: dict[int, asyncio.StreamWriter] = {}
        self._is_ready = self._is_closing = False
        self.lost: asyncio.Future[EngineFailed] = asyncio.get_running_loop().create_future()
        """Done when another rank's host has ended."""
        self.port = 0
        """Port of the first rank's engine, at which the engines of all ranks meet."""

    async def open(self) -> None:
        """Listen, and publish the address until `close`. Raises `EngineFailed`."""
        try:
            self._server = await asyncio.start_server(self._answer, self._host, 0, limit=LINE_BYTES)
            self.port = free_port(self._host)
        except OSError as e:
            raise EngineFailed(
                f"A rank cannot listen on {self._host}: {e.strerror}. Set THAW_STAGE_HOST to an address of this node"
            ) from e
        port = self._server.sockets[0].getsockname()[1]
        listening = StageListening(group_id=self._stage.group_id, index=0, host=own_address(self._host), port=port)
        self._publishing = asyncio.create_task(self._publish_forever(listening), name="rank-address")

    def announce_ready(self) -> None:
        """Notify the other ranks that the engine answers requests."""
        self._is_ready = True
        for writer in self._members.values():
            write_line(writer, event=READY)

    async def close(self, *, is_orderly: bool = True) -> None:
        """End the group. Calling it again has no effect.

        Args:
            is_orderly: It stops; otherwise the other ranks report a failure.
        """
        self._is_closing = True
        if self._publishing is not None:
            await end(self._publishing)
        if self._server is not None:
            self._server.close()
        for writer in tuple(self._members.values()):  # a member that ends meanwhile is removed
            if is_orderly:
                with contextlib.suppress(OSError):
                    write_line(writer, event=CLOSING)
                    await writer.drain()
            writer.close()
        self._members.clear()

    async def _publish_forever(self, listening: StageListening) -> None:
        subject = subjects.stage_group(self._stage.group_id)
        while True:
            with contextlib.suppress(NatsError):  # the next one follows
                await self._mesh.nc.publish(subject, listening.model_dump_json().encode())
            await asyncio.sleep(_AGAIN_S)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        configure(writer.get_extra_info("socket"))
        try:
            index = await accept_member(reader, writer, self._stage, self.port, self._members)
        except (NotProven, EOFError, OSError, TimeoutError) as e:
            log.warning("refused a connection to a group's first rank", extra={"group": self._stage.group_id, "error": repr(e)})
            writer.close()
            return
        self._members[index] = writer
        if self._is_ready:
            write_line(writer, event=READY)
        with contextlib.suppress(OSError):
            while await reader.read(LINE_BYTES):
                pass
        self._members.pop(index, None)
        writer.close()
        if not self._is_closing and not self.lost.done():
            self.lost.set_result(EngineFailed(f"The host of rank {index} has ended, so the group ends"))
