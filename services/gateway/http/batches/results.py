"""The results of a batch: an output file and an error file, with one part for each input line."""

from __future__ import annotations

import hashlib
import time
from typing import Any

from pydantic_core import from_json, to_json

from services.gateway.adapters.file_store import FileStore
from services.gateway.domain.batches.batch import Batch
from services.gateway.domain.batches.input_lines import InputLine
from services.gateway.domain.batches.owner_state import StoredFile
from services.gateway.http.batches.call import CallResponse


def _file_id(batch_id: str, kind: str) -> str:
    """Derive an id, so that every gateway that runs the batch writes to the same file."""
    return f"file-{hashlib.sha256(f'{batch_id} {kind}'.encode()).hexdigest()[:32]}"


class Results:
    """The stored results of one batch."""

    def __init__(self, files: FileStore, owner: str, batch_id: str, max_bytes: int) -> None:
        self._files = files
        self._owner = owner
        self._batch_id = batch_id
        self._max_bytes = max_bytes
        self._ids = {kind: _file_id(batch_id, kind) for kind in ("output", "error")}
        self._sizes: dict[str, dict[int, int]] = {"output": {}, "error": {}}

    @property
    def completed(self) -> int:
        return len(self._sizes["output"])

    @property
    def failed(self) -> int:
        return len(self._sizes["error"])

    def has(self, number: int) -> bool:
        """True if the request of a line has its result."""
        return any(number in sizes for sizes in self._sizes.values())

    async def load(self) -> None:
        """Read which results are stored. Raises `Unavailable`."""
        for kind, file_id in self._ids.items():
            numbers = await self._files.numbers(self._owner, file_id)
            sizes = [len(part) async for part in self._files.read(self._owner, file_id, numbers)]
            self._sizes[kind] = dict(zip(numbers, sizes, strict=True))

    async def add_response(self, line: InputLine, response: CallResponse) -> None:
        """Store a final response. Raises `Unavailable`, or `StoreFull`."""
        try:
            body: Any = from_json(response.body)
        except ValueError:
            await self.add_error(line, "invalid_response", f"The response, with status {response.status}, is not JSON")
            return
        answered = {"status_code": response.status, "request_id": response.headers.get("x-request-id", ""), "body": body}
        text = self._line(line, answered, None)
        stored = sum(sum(sizes.values()) for sizes in self._sizes.values())
        if len(text) > self._files.max_part_bytes or stored + len(text) > self._max_bytes:
            await self.add_error(line, "result_too_large", "There is no room for the result of this request")
            return
        await self._write("output" if response.status == 200 else "error", line.number, text)

    async def add_error(self, line: InputLine, code: str, message: str) -> None:
        """Store that a request has no response. Raises `Unavailable`, or `StoreFull`."""
        await self._write("error", line.number, self._line(line, None, {"code": code, "message": f"{message}."}))

    def _line(self, line: InputLine, response: dict[str, Any] | None, error: dict[str, str] | None) -> bytes:
        name = hashlib.sha256(f"{self._batch_id} {line.number}".encode()).hexdigest()[:32]
        return to_json({"id": f"batch_req_{name}", "custom_id": line.custom_id, "response": response, "error": error}) + b"\n"

    async def _write(self, kind: str, number: int, text: bytes) -> None:
        await self._files.write(self._owner, self._ids[kind], number, text)
        self._sizes[kind][number] = len(text)

    def stored_files(self, batch: Batch, ttl_s: float) -> dict[str, StoredFile]:
        """Return the records of the files that have content, by kind."""
        now = int(time.time())
        return {
            kind: StoredFile(
                id=self._ids[kind],
                filename=f"{batch.id}_{kind}.jsonl",
                purpose="batch_output",
                size_bytes=sum(sizes.values()),
                created_at=now,
                expires_at=now + int(ttl_s),
            )
            for kind, sizes in self._sizes.items()
            if sizes
        }
