"""OpenAI's Files API, for the input and the results of batches."""

from __future__ import annotations

import contextlib
import re
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from typing import Any

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Scope

from services.gateway.adapters.batch_store import ANONYMOUS
from services.gateway.adapters.file_store import PART_BYTES
from services.gateway.authorization import Authorizer
from services.gateway.domain.batches.owner_state import (
    OwnerBounds,
    OwnerState,
    StoredFile,
    add_file,
    check_room,
    remove_file,
)
from services.gateway.http.endpoints.listing import page_of
from services.gateway.http.endpoints.received import client_of
from services.gateway.http.errors import json_response
from services.gateway.http.parsing.body import BodyReceiver
from services.gateway.http.parsing.upload import Upload
from services.gateway.http.scopes import caller_of
from services.gateway.loop import Gateway
from services.gateway.settings import GatewaySettings
from shared.errors import InvalidRequest, RequestTimeout, ThawError

ROUTE = "/v1/files"
_PURPOSE = "batch"
_SECONDS = re.compile(r"[0-9]{1,9}")
_MIN_EXPIRY_S = 3600


def owner_of(scope: Scope) -> str:
    """Return the owner of what a request makes or asks for: the digest of its API key."""
    return caller_of(scope).digest or Authorizer.key_hash(Headers(scope=scope)) or ANONYMOUS


def bounds_of(settings: GatewaySettings) -> OwnerBounds:
    """Read the bounds on a key's files and batches from the settings."""
    return OwnerBounds(
        files=settings.files_per_key,
        size_bytes=settings.files_bytes_per_key,
        active_batches=settings.batches_per_key,
        batches=max(100, 2 * settings.batches_per_key),
    )


def file_object(file: StoredFile) -> dict[str, Any]:
    """Describe a file as OpenAI's API does."""
    return {
        "id": file.id,
        "object": "file",
        "bytes": file.size_bytes,
        "created_at": file.created_at,
        "expires_at": file.expires_at,
        "filename": file.filename,
        "purpose": file.purpose,
        "status": "processed",
        "status_details": None,
    }


class Files:
    """`/v1/files`. A file exists only for the API key that made it."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._bounds = bounds_of(gateway.settings)
        self._uploading: Counter[str] = Counter()
        """Stored bytes of uploads in progress, by owner: no record has them yet."""

    def routes(self) -> list[Route]:
        return [
            Route(ROUTE, self.create, methods=["POST"]),
            Route(ROUTE, self.list, methods=["GET"]),
            Route(ROUTE + "/{id}", self.read, methods=["GET"]),
            Route(ROUTE + "/{id}", self.delete, methods=["DELETE"]),
            Route(ROUTE + "/{id}/content", self.content, methods=["GET"]),
        ]

    async def create(self, request: Request) -> Response:
        """Store an upload; its content is written while it arrives."""
        receive = BodyReceiver(request.receive)
        try:
            return json_response(file_object(await self._store(request, receive)))
        except RequestTimeout:
            raise
        except ThawError:
            await receive.discard(self._gateway.settings.body_timeout)
            raise

    async def _store(self, request: Request, receive: BodyReceiver) -> StoredFile:
        gateway, settings, owner = self._gateway, self._gateway.settings, owner_of(request.scope)
        before = await gateway.batches.read(owner)
        check_room(before, 0, self._bounds)
        file_id, count = f"file-{uuid.uuid4().hex}", 0
        limit = min(settings.max_file_bytes, settings.files_bytes_per_key)
        with gateway.admission.begin(client_of(request.scope)) as reservation, self._count_upload(owner, before) as count_bytes:

            async def write(part: bytes) -> None:
                nonlocal count
                count_bytes(len(part))
                await gateway.files.write(owner, file_id, count, part)
                count += 1

            upload = Upload(write, min(PART_BYTES, gateway.files.max_part_bytes), limit)
            reservation.grow(2 * PART_BYTES)
            try:
                await upload.read(request.headers.get("content-type", ""), receive, settings.body_timeout)
                now = int(time.time())
                file = StoredFile(
                    id=file_id,
                    filename=upload.filename or "",
                    purpose=_checked_purpose(upload.fields),
                    size_bytes=upload.size_bytes,
                    created_at=now,
                    expires_at=now + _checked_expiry(upload.fields, settings.files_ttl),
                )
                await gateway.batches.change(owner, partial(add_file, file=file, bounds=self._bounds))
            except BaseException:
                if count:
                    with contextlib.suppress(ThawError):
                        await gateway.files.remove(owner, file_id)
                raise
        return file

    @contextlib.contextmanager
    def _count_upload(self, owner: str, before: OwnerState) -> Iterator[Callable[[int], None]]:
        """Count the bytes of an upload with those of its key's other uploads until the block ends.

        Yields a function that counts more of them, and raises as `check_room`.
        """
        counted = 0

        def count_bytes(more: int) -> None:
            nonlocal counted
            counted += more
            self._uploading[owner] += more
            check_room(before, self._uploading[owner], self._bounds)

        try:
            yield count_bytes
        finally:
            self._uploading[owner] -= counted
            if not self._uploading[owner]:
                del self._uploading[owner]

    async def list(self, request: Request) -> Response:
        state = await self._gateway.batches.read(owner_of(request.scope))
        purpose = request.query_params.get("purpose")
        files = [file_object(file) for file in reversed(state.files) if purpose in (None, file.purpose)]
        return json_response(page_of(request, files, default=1000, most=10_000))

    async def read(self, request: Request) -> Response:
        return json_response(file_object(await self._find(request)))

    async def delete(self, request: Request) -> Response:
        file_id = request.path_params["id"]
        await self._gateway.batches.change(owner_of(request.scope), partial(remove_file, file_id=file_id))
        return json_response({"id": file_id, "object": "file", "deleted": True})

    async def content(self, request: Request) -> Response:
        """Send the content in the order of its parts; results in the order of the input's lines."""
        owner, file = owner_of(request.scope), await self._find(request)
        numbers = await self._gateway.files.numbers(owner, file.id)
        headers = {"content-length": str(file.size_bytes), "x-content-type-options": "nosniff"}

        async def parts() -> AsyncIterator[bytes]:
            async for part in self._gateway.files.read(owner, file.id, numbers):
                yield part

        return StreamingResponse(parts(), headers=headers, media_type="application/octet-stream")

    async def _find(self, request: Request) -> StoredFile:
        return (await self._gateway.batches.read(owner_of(request.scope))).file(request.path_params["id"])


def _checked_purpose(fields: dict[str, str]) -> str:
    if "purpose" not in fields:
        raise InvalidRequest("Missing required parameter: 'purpose'.", param="purpose")
    if fields["purpose"] != _PURPOSE:
        raise InvalidRequest(
            f"The purpose {fields['purpose'][:50]!r} is not supported. Files are for batches: send 'batch'", param="purpose"
        )
    return _PURPOSE


def _checked_expiry(fields: dict[str, str], most_s: float) -> int:
    """Return after how many seconds the file expires."""
    given = fields.get("expires_after[seconds]")
    if given is None:
        return int(most_s)
    if fields.get("expires_after[anchor]") != "created_at":
        raise InvalidRequest("'expires_after[anchor]' must be created_at", param="expires_after")
    if not _SECONDS.fullmatch(given) or int(given) < _MIN_EXPIRY_S:
        raise InvalidRequest(f"'expires_after[seconds]' must be a whole number from {_MIN_EXPIRY_S}", param="expires_after")
    return min(int(given), int(most_s))
