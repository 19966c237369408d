"""Contents of files: a JetStream bucket, with numbered parts of each file.

The part `OWNER.FILE.NUMBER` of an upload has up to `PART_BYTES`. Of the results of a batch it is
the result of one input line, so that a result is durable as soon as it is written, and one that is
written again replaces itself. See docs/adr/0078-files-and-batches.md.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import contextmanager

from nats.errors import Error as NatsError
from nats.js import JetStreamContext
from nats.js.errors import APIError, KeyNotFoundError, NotFoundError
from nats.js.kv import KeyValue

from shared.contracts import subjects
from shared.errors import NotFound, Unavailable
from shared.messaging import Mesh
from shared.messaging.full_stores import full_as
from shared.messaging.streams import files_bucket

PART_BYTES = 512 * 1024
_READ_AHEAD = 16
_STREAM = f"KV_{subjects.FILES_BUCKET}"
_FULL = "The store of files is full. Delete files, or wait until some expire"
_TIMEOUT_S = 5


@contextmanager
def errors_as_unavailable() -> Iterator[None]:
    """Raise `Unavailable` for errors of NATS."""
    try:
        yield
    except (NatsError, APIError, TimeoutError) as e:
        raise Unavailable(
            f"The store of files cannot be reached ({type(e).__name__}). Repeat the request", should_retry=True
        ) from e


class FileStore:
    """The contents of all files, as one gateway accesses them.

    All methods raise `Unavailable` if NATS cannot be reached.
    """

    def __init__(self, mesh: Mesh, ttl_s: float) -> None:
        self._mesh = mesh
        self._ttl_s = ttl_s
        self._bucket: KeyValue | None = None

    @property
    def max_part_bytes(self) -> int:
        """Largest part in bytes."""
        return self._mesh.max_body

    async def write(self, owner: str, file_id: str, number: int, data: bytes) -> None:
        """Write a part. Raises `StoreFull` if there is no room."""
        with errors_as_unavailable(), full_as(_FULL):
            await (await self._open()).put(f"{owner}.{file_id}.{number}", data)

    async def numbers(self, owner: str, file_id: str) -> list[int]:
        """Return the numbers of the parts of a file in ascending order; empty if there is none."""
        with errors_as_unavailable():
            await self._open()
            prefix = f"$KV.{subjects.FILES_BUCKET}.{owner}.{file_id}."
            info = await self._js().stream_info(_STREAM, subjects_filter=f"{prefix}>")
        return sorted(int(subject.removeprefix(prefix)) for subject in (info.state.subjects or {}))

    async def read(self, owner: str, file_id: str, numbers: Iterable[int]) -> AsyncIterator[bytes]:
        """Read parts in the given order.

        Raises:
            NotFound: A part has expired or was removed meanwhile.
        """
        bucket, wanted = await self._open(), list(numbers)
        for at in range(0, len(wanted), _READ_AHEAD):
            group = wanted[at : at + _READ_AHEAD]
            for part in await asyncio.gather(*(self._part(bucket, f"{owner}.{file_id}.{number}") for number in group)):
                yield part

    async def _part(self, bucket: KeyValue, entry: str) -> bytes:
        with errors_as_unavailable():
            try:
                return (await bucket.get(entry)).value or b""
            except KeyNotFoundError as e:
                raise NotFound("The content of this file has expired or was deleted") from e

    async def remove(self, owner: str, file_id: str) -> None:
        """Remove the content of a file."""
        with errors_as_unavailable():
            try:
                await self._js().purge_stream(_STREAM, subject=f"$KV.{subjects.FILES_BUCKET}.{owner}.{file_id}.>")
            except NotFoundError:  # no file has ever been written
                return

    def _js(self) -> JetStreamContext:
        return self._mesh.nc.jetstream(timeout=_TIMEOUT_S)

    async def _open(self) -> KeyValue:
        if self._bucket is None:
            with errors_as_unavailable():
                self._bucket = await files_bucket(self._js(), self._ttl_s, self._mesh.replicas)
        return self._bucket
