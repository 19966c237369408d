"""Bodies that exceed a message, in files of the gateway, and the replies to hosts that read them.

A file has no name, so that it disappears with its gateway, however that ends. The kernel keeps its
pages in memory as long as there is room.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

from nats.aio.msg import Msg
from nats.errors import Error as NatsError
from pydantic import ValidationError

from shared.contracts import subjects
from shared.contracts.base import Failure
from shared.contracts.request_body import BODY_PART_HEAD_BYTES, ReadBodyPart
from shared.errors import BodyLost, InvalidRequest, StoreFull, ThawError
from shared.messaging import Mesh
from shared.messaging.body_parts import encode_body_part
from shared.private import make_private

log = logging.getLogger(__name__)
_LOST = "The gateway does not hold this body: its request has ended. Repeat the request"


class BodyFile:
    """The file of one body. Threads use it in turn, so that none uses a closed descriptor."""

    def __init__(self, body_id: str, descriptor: int) -> None:
        self.body_id = body_id
        self.size_bytes = 0
        self._descriptor = descriptor
        self._turn = threading.Lock()
        self._is_closed = False

    async def append(self, data: bytes) -> None:
        """Write at the end. Raises `StoreFull` if the disk has no room."""
        try:
            await asyncio.to_thread(self._write, data)
        except OSError as e:
            log.warning("failed to write a request's body", extra={"error": repr(e)})
            raise StoreFull(f"The gateway has no room on its disk for this body ({e.strerror}). Send it later") from e
        self.size_bytes += len(data)

    async def read(self, offset: int, size: int) -> bytes:
        """Read at most `size` bytes. Raises `BodyLost` if the body has been closed."""
        return await asyncio.to_thread(self._read, offset, size)

    def close(self) -> None:
        """Delete the file, after what threads do with it now."""
        asyncio.get_running_loop().run_in_executor(None, self._close)

    def _write(self, data: bytes) -> None:
        with self._turn:
            rest = memoryview(data)
            while rest and not self._is_closed:
                rest = rest[os.write(self._descriptor, rest) :]

    def _read(self, offset: int, size: int) -> bytes:
        with self._turn:
            if self._is_closed:
                raise BodyLost(_LOST)
            return os.pread(self._descriptor, size, offset)

    def _close(self) -> None:
        with self._turn:
            self._is_closed = True
            os.close(self._descriptor)


class HeldBodies:
    """The open bodies of a gateway."""

    def __init__(self, mesh: Mesh, gateway_id: str, directory: Path) -> None:
        self._mesh = mesh
        self._gateway_id = gateway_id
        self._directory = directory
        self._files: dict[str, BodyFile] = {}

    @property
    def gateway_id(self) -> str:
        return self._gateway_id

    @property
    def count(self) -> int:
        """Number of open bodies."""
        return len(self._files)

    async def start(self) -> None:
        """Reply to `ReadBodyPart` from now on."""
        await self._mesh.nc.subscribe(subjects.body_parts(self._gateway_id), cb=self._on_read)

    @contextlib.contextmanager
    def scope(self) -> Iterator[BodyScope]:
        """Close the bodies that are opened in this scope when the block ends."""
        opened = BodyScope(self)
        try:
            yield opened
        finally:
            for body_id in opened.body_ids:
                self._files.pop(body_id).close()

    async def open(self) -> BodyFile:
        """Open an empty body. Raises `StoreFull` if no file can be made."""
        opening = asyncio.get_running_loop().run_in_executor(None, _open_unnamed, self._directory)
        try:
            descriptor = await asyncio.shield(opening)
        except asyncio.CancelledError:
            opening.add_done_callback(_close_opened)
            raise
        except OSError as e:
            raise StoreFull(f"The gateway cannot store this body ({e.strerror}). Send it later") from e
        file = BodyFile(secrets.token_hex(16), descriptor)
        self._files[file.body_id] = file
        return file

    async def _on_read(self, message: Msg) -> None:
        try:
            reply = await self._read(message.data)
        except ThawError as e:
            reply = Failure(error=e.body()).model_dump_json().encode()
        except Exception as e:
            log.exception("failed to read a request's body")
            reply = Failure(error=ThawError(f"{type(e).__name__} while reading a body").body()).model_dump_json().encode()
        with contextlib.suppress(NatsError):
            await message.respond(reply)

    async def _read(self, data: bytes) -> bytes:
        try:
            request = ReadBodyPart.model_validate_json(data)
        except ValidationError as e:
            raise InvalidRequest("Malformed message for a part of a body") from e
        file = self._files.get(request.body_id)
        if file is None:
            raise BodyLost(_LOST)
        if request.offset >= file.size_bytes:
            raise InvalidRequest(f"The body has {file.size_bytes} bytes, and none at {request.offset}")
        limit = min(request.limit, self._mesh.max_body - BODY_PART_HEAD_BYTES)
        return encode_body_part(request.offset, await file.read(request.offset, limit))


class BodyScope:
    """The bodies of one HTTP request; none, usually."""

    def __init__(self, bodies: HeldBodies) -> None:
        self._bodies = bodies
        self.body_ids: list[str] = []

    @property
    def gateway_id(self) -> str:
        return self._bodies.gateway_id

    async def open(self) -> BodyFile:
        """Open a body. Raises `StoreFull`."""
        file = await self._bodies.open()
        self.body_ids.append(file.body_id)
        return file


def _open_unnamed(directory: Path) -> int:
    make_private(directory)
    with tempfile.TemporaryFile(dir=directory) as file:
        return os.dup(file.fileno())


def _close_opened(opening: asyncio.Future[int]) -> None:
    """Close the file of a request that ended while it was opened."""
    if not opening.cancelled() and opening.exception() is None:
        os.close(opening.result())
