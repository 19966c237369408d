"""Serve local readers without NATS over a Unix socket.

shared/contracts/loader_socket.py defines the protocol. A hold ends with its connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from pydantic import ValidationError

from services.loader.adapters.descriptors import open_again, send_descriptors, visible_process
from services.loader.handlers import Loader
from services.loader.kv_lending import KvLending
from shared.contracts.base import Message
from shared.contracts.loader_socket import (
    MAX_LINE_BYTES,
    SOCKET_ASK,
    SocketArrived,
    SocketAttach,
    SocketAttached,
    SocketAudit,
    SocketAudited,
    SocketBorrow,
    SocketComplete,
    SocketDescriptors,
    SocketError,
    SocketFollow,
    SocketMap,
    SocketPages,
    SocketUnits,
    SocketWatermark,
)
from shared.contracts.segment import ByteRange, PagesLayout, UnitPages
from shared.errors import InvalidRequest, NotFound, ThawError
from shared.unix_sockets import short_address

log = logging.getLogger(__name__)
_UNITS_AT_ONCE = 64
"""Units in one line, which stays below `MAX_LINE_BYTES` even with one extent for each page."""


class LocalReaders:
    """Connections of one socket.

    Args:
        loader: Attaches the weights.
        shared_memory: Directory of the pool.
        prefix: Makes holders' names unique across restarts of the loader.
        lending: Lends pages for KV caches; None: connections cannot borrow.
    """

    def __init__(self, loader: Loader, shared_memory: Path, prefix: str, lending: KvLending | None = None) -> None:
        self._loader, self._shared_memory, self._prefix, self._lending = loader, shared_memory, prefix, lending
        self._numbers = itertools.count(1)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        holder = f"{self._prefix}-{next(self._numbers)}"
        try:
            await self._answer(holder, reader, writer)
        except ThawError as e:
            await _send(writer, SocketError(error=e.body()))
        except (ConnectionError, TimeoutError):  # the reader disconnected, which ends the hold
            pass
        finally:
            self._loader.release_hold(holder)
            writer.close()
            with contextlib.suppress(ConnectionError, TimeoutError):
                await writer.wait_closed()

    async def _answer(self, holder: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            line = await reader.readuntil(b"\n")
            ask = SOCKET_ASK.validate_json(line)
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            return
        except ValidationError as e:
            raise InvalidRequest(f"The line is no request: {e.errors()[0]['msg']}. See shared/contracts/loader_socket.py") from e
        if isinstance(ask, SocketAudit):
            await _send(writer, SocketAudited(devices=(await self._loader.audit()).devices))
            return
        if isinstance(ask, SocketBorrow):
            if self._lending is None:
                raise NotFound(f"{ask.device} has no memory of its own on this node")
            await self._lending.serve(holder, ask, reader, writer)
            return
        # The reader sends nothing more: reading ends when it disconnects.
        gone = asyncio.create_task(reader.read(1), name=f"{holder}-gone")
        work = asyncio.create_task(self._serve(holder, ask, writer), name=holder)
        try:
            await asyncio.wait((gone, work), return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
                await gone
        finally:
            for task in (gone, work):
                task.cancel()
            await asyncio.gather(gone, work, return_exceptions=True)

    async def _serve(self, holder: str, ask: SocketAttach | SocketFollow | SocketMap, writer: asyncio.StreamWriter) -> None:
        match ask:
            case SocketAttach():
                await self._serve_hold(holder, ask, writer)
            case SocketFollow():
                await self._serve_follower(ask, writer)
            case SocketMap():
                await self._serve_units(ask, writer)

    async def _serve_units(self, ask: SocketMap, writer: asyncio.StreamWriter) -> None:
        for units, export in self._loader.export_units(ask, visible_process(writer)):
            await _send_directly(writer, SocketDescriptors(units=units), export)
        await _send(writer, SocketComplete(loaded_bytes=0))

    async def _serve_hold(self, holder: str, ask: SocketAttach, writer: asyncio.StreamWriter) -> None:
        card = await self._loader.card_of(weights_id=ask.weights_id, source=ask.source)
        attached = await self._loader.hold(holder, card, background=ask.background, rank=ask.rank)
        sent_bytes = attached.loaded_bytes
        await _send(
            writer,
            SocketAttached(
                weights_id=attached.weights_id,
                path=str(self._shared_memory / attached.segment),
                extents=attached.extents,
                directory=attached.directory,
                total_bytes=attached.total_bytes,
                loaded_bytes=sent_bytes,
            ),
        )
        async for loaded in self._loader.watermarks(attached.weights_id):
            if loaded > sent_bytes:
                sent_bytes = loaded
                await _send(writer, SocketWatermark(loaded_bytes=loaded))
        await _send(writer, SocketComplete(loaded_bytes=attached.total_bytes))

    async def _serve_follower(self, ask: SocketFollow, writer: asyncio.StreamWriter) -> None:
        pid: int | None = None
        async for found in self._loader.follow(ask.instance_id, ask.weights_id):
            for layout in (a for a in found if isinstance(a, PagesLayout)):
                pid = visible_process(writer) if layout.bus_id is not None else None
                await _send_directly(writer, SocketPages(layout=layout))
            if ranges := tuple(a for a in found if isinstance(a, ByteRange)):
                await _send(writer, SocketArrived(ranges=ranges))
            units = [a for a in found if isinstance(a, UnitPages)]
            for some in (tuple(units[first : first + _UNITS_AT_ONCE]) for first in range(0, len(units), _UNITS_AT_ONCE)):
                if pid is None:
                    await _send(writer, SocketUnits(units=some))
                    continue
                numbers = tuple(u.unit for u in some)
                export = self._loader.export_arrived(ask, numbers, pid)
                await _send_directly(writer, SocketDescriptors(units=numbers), export)
        await _send(writer, SocketComplete(loaded_bytes=0))


async def _send_directly(writer: asyncio.StreamWriter, message: Message, export: Callable[[], Sequence[int]] = lambda: ()) -> None:
    """Send a message, and descriptors with it. Nothing may be queued in the writer.

    The thread closes the descriptors, also if the engine disconnects meanwhile.
    """
    line = message.model_dump_json().encode() + b"\n"
    await asyncio.shield(asyncio.to_thread(send_descriptors, open_again(writer), line, export))


async def _send(writer: asyncio.StreamWriter, message: Message) -> None:
    with contextlib.suppress(ConnectionError):
        writer.write(message.model_dump_json().encode() + b"\n")
        await writer.drain()


@asynccontextmanager
async def listening(path: Path, readers: LocalReaders) -> AsyncIterator[None]:
    """Serve on `path`, for this user only. Replaces the socket of an earlier loader."""
    connections: set[asyncio.Task[None]] = set()

    def on_connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(readers.serve(reader, writer), name="local-reader")
        connections.add(task)
        task.add_done_callback(connections.discard)

    path.unlink(missing_ok=True)
    server = await asyncio.start_unix_server(on_connected, sock=_bind_socket(path), limit=MAX_LINE_BYTES)
    try:
        yield
    finally:
        server.close()
        for task in tuple(connections):
            task.cancel()
        await asyncio.gather(*connections, return_exceptions=True)
        path.unlink(missing_ok=True)


def _bind_socket(path: Path) -> socket.socket:
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with short_address(path) as address:
            bound.bind(address)
        path.chmod(0o600)
    except BaseException:
        bound.close()
        raise
    return bound
