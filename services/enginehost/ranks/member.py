"""A later rank's side: it finds the host of the first rank, and follows its group."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from nats.aio.msg import Msg
from nats.errors import Error as NatsError
from pydantic import ValidationError

from services.enginehost.ranks.connection import CLOSING, LINE_BYTES, READY, NotProven, meet_head, read_line
from shared.contracts import subjects
from shared.contracts.stages import Stage, StageListening
from shared.engines.peer_sockets import configure
from shared.errors import EngineFailed
from shared.messaging import Mesh
from shared.tasks import end

log = logging.getLogger(__name__)
_CONNECT_S = 5.0


class RankMember:
    """The connection to the first rank's host, after its handshake.

    Attributes:
        host: Address of the first rank's node.
        port: The port at which the engines of all ranks meet.
        ready: Set when the first rank's engine answers requests.
        closed: Set when the group has ended in order.
        lost: Done when the first rank's host has ended otherwise.
    """

    def __init__(self, host: str, port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.host, self.port = host, port
        self.ready, self.closed = asyncio.Event(), asyncio.Event()
        self.lost: asyncio.Future[EngineFailed] = asyncio.get_running_loop().create_future()
        self._writer = writer
        self._following = asyncio.create_task(self._follow(reader), name="first-rank")

    async def close(self) -> None:
        await end(self._following)
        self._writer.close()

    async def _follow(self, reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(EOFError, OSError, NotProven):
            while True:
                event = (await read_line(reader)).get("event")
                if event == READY:
                    self.ready.set()
                elif event == CLOSING:
                    self.closed.set()
        if not self.closed.is_set():
            self.lost.set_result(EngineFailed("The host of the group's first rank has ended, so the group ends"))


async def join(mesh: Mesh, stage: Stage) -> RankMember:
    """Wait for the first rank's address, and connect. The caller bounds the time.

    Args:
        mesh: A connected mesh.
        stage: This rank's place in its group.
    """
    async with _addresses(mesh, stage) as addresses:
        while True:
            listening = await addresses.get()
            try:
                return await _connect(listening, stage)
            except (NotProven, EOFError, OSError, TimeoutError) as e:  # it publishes its address again
                log.warning("failed to join a group's first rank", extra={"group": stage.group_id, "error": repr(e)})


@asynccontextmanager
async def _addresses(mesh: Mesh, stage: Stage) -> AsyncIterator[asyncio.Queue[StageListening]]:
    latest: asyncio.Queue[StageListening] = asyncio.Queue(1)

    async def on_message(message: Msg) -> None:
        with contextlib.suppress(ValidationError):
            listening = StageListening.model_validate_json(message.data)
            if listening.index == 0 and listening.group_id == stage.group_id:
                if latest.full():
                    latest.get_nowait()
                latest.put_nowait(listening)

    subscription = await mesh.nc.subscribe(subjects.stage_group(stage.group_id), cb=on_message)
    try:
        yield latest
    finally:
        with contextlib.suppress(NatsError):
            await subscription.unsubscribe()


async def _connect(listening: StageListening, stage: Stage) -> RankMember:
    async with asyncio.timeout(_CONNECT_S):
        reader, writer = await asyncio.open_connection(listening.host, listening.port, limit=LINE_BYTES)
    configure(writer.get_extra_info("socket"))
    try:
        port = await meet_head(reader, writer, stage)
    except BaseException:
        writer.close()
        raise
    return RankMember(listening.host, port, reader, writer)
