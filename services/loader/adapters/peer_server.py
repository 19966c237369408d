"""Serve this node's models to other loaders by HTTP, read-only.

The server supports ranges, uses sendfile, and requires a bearer token.

GET /models/REVISION         the file list, as the cache's entry.json
GET /models/REVISION/NAME    a file of that list; no other file of this host is reachable

Models are on the disk, or in host memory only. Of those the list has the weight files.
"""

from __future__ import annotations

import hmac
import logging
import os
import re
import secrets
import socket
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import unquote, urlsplit

from services.loader.adapters.resident import ResidentFiles
from shared.errors import CheckpointInvalid
from weights.cache.store import EntryRecord

log = logging.getLogger(__name__)
_PATH = re.compile(r"/models/(?P<revision>[0-9a-f]{8,64})(/(?P<name>.+))?")
_RANGE = re.compile(r"bytes=[ \t]*(?P<first>[0-9]{0,18})-(?P<last>[0-9]{0,18})[ \t]*", re.IGNORECASE)
_CONNECTIONS = 64
_IDLE_S = 60.0
_SEND_BYTES = 1024 * 1024

Find = Callable[[str], AbstractContextManager[tuple[Path, EntryRecord] | None]]
"""Find the directory and record of a complete revision, which is pinned while the context is open;
None if there is none.
"""
FindResident = Callable[[str], ResidentFiles | None]
"""Find the weight files of a revision in host memory; None if they are not there."""


class PeerServer:
    """Serve from construction until `close`.

    Raises `OSError` if the address cannot be bound.
    """

    def __init__(self, host: str, port: int, find: Find, find_resident: FindResident = lambda revision: None) -> None:
        self.token = secrets.token_urlsafe(32)
        slots = threading.BoundedSemaphore(_CONNECTIONS)

        class Handler(_Handler):
            pass

        Handler.find, Handler.find_resident, Handler.token = staticmethod(find), staticmethod(find_resident), self.token
        self._server = _Server((host, port), Handler, slots)
        named = socket.gethostname() if host in ("", "0.0.0.0", "::") else host
        self.url = f"http://[{named}]:{self._server.server_port}" if ":" in named else f"http://{named}:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, name="peers", kwargs={"poll_interval": 0.2}, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Close all connections; the clients fail over to the source."""
        self._server.shutdown()
        self._thread.join()
        self._server.hang_up()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, address: tuple[str, int], handler: type[_Handler], slots: threading.BoundedSemaphore) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self._slots, self._open, self._lock = slots, set[socket.socket](), threading.Lock()
        super().__init__(address, handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._slots.acquire(blocking=False):
            self.shutdown_request(request)  # the client fails over to another source
            return
        with self._lock:
            self._open.add(request)
        try:
            super().process_request(request, client_address)
        except Exception:  # no thread can be started; the caller closes the connection
            self._release(request)
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._release(request)

    def _release(self, request: socket.socket) -> None:
        with self._lock:
            self._open.discard(request)
        self._slots.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.debug("a peer hung up", exc_info=True)

    def hang_up(self) -> None:
        with self._lock:
            for request in self._open:
                try:
                    request.shutdown(socket.SHUT_RDWR)
                except OSError:
                    continue


class _Handler(BaseHTTPRequestHandler):
    find: ClassVar[Find]
    find_resident: ClassVar[FindResident]
    token: ClassVar[str]
    protocol_version = "HTTP/1.1"
    timeout = _IDLE_S

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: the loader that loads logs it."""

    def do_GET(self) -> None:
        given = self.headers.get("Authorization", "")
        if not hmac.compare_digest(given.encode(), f"Bearer {self.token}".encode()):
            return self._send_empty(HTTPStatus.UNAUTHORIZED)
        found = _PATH.fullmatch(unquote(urlsplit(self.path).path))
        if found is None:
            return self._send_empty(HTTPStatus.NOT_FOUND)
        resident = type(self).find_resident(found["revision"])
        if resident is not None and found["name"] is not None and resident.size(found["name"]) is not None:
            return self._send_resident(resident, found["name"])
        with type(self).find(found["revision"]) as model:
            if model is None and resident is not None and found["name"] is None:
                return self._listing(resident.record)
            if model is None:
                return self._send_empty(HTTPStatus.NOT_FOUND)
            directory, record = model
            if found["name"] is None:
                return self._listing(record)
            if all(f.name != found["name"] for f in record.files):
                return self._send_empty(HTTPStatus.NOT_FOUND)
            return self._file(directory, found["name"])

    def _listing(self, record: EntryRecord) -> None:
        data = record.model_dump_json().encode()
        part = self._begin(len(data), "application/json")
        self.wfile.write(data[part.start : part.stop])

    def _file(self, directory: Path, name: str) -> None:
        from weights.formats.root import check_inside

        try:
            check_inside(directory, directory / name)
            file = (directory / name).open("rb")
        except (OSError, CheckpointInvalid):
            return self._send_empty(HTTPStatus.NOT_FOUND)
        with file:
            part = self._begin(os.fstat(file.fileno()).st_size, "application/octet-stream")
            if part:
                self.wfile.flush()
                if self.connection.sendfile(file, part.start, len(part)) < len(part):  # it was truncated meanwhile
                    self.close_connection = True
        return None

    def _send_resident(self, resident: ResidentFiles, name: str) -> None:
        """Send a file from host memory. The connection is cut if the weights leave it meanwhile."""
        part = self._begin(resident.size(name) or 0, "application/octet-stream")
        buffer = memoryview(bytearray(min(_SEND_BYTES, len(part))))
        for start in range(part.start, part.stop, _SEND_BYTES):
            piece = buffer[: part.stop - start]
            if not resident.read(name, start, piece):
                self.close_connection = True
                return
            self.wfile.write(piece)

    def _begin(self, size: int, kind: str) -> range:
        """Send the head of a response with a file, or the part of it that was asked for.

        Returns:
            The bytes to send; none if there is no such part.
        """
        # Without an ETag, the condition of If-Range is never true.
        part = None if "If-Range" in self.headers else requested_range(self.headers.get("Range", ""), size)
        if part is not None and not part:
            self._send_empty(HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE, f"bytes */{size}")
            return part
        self.send_response(HTTPStatus.OK if part is None else HTTPStatus.PARTIAL_CONTENT)
        if part is not None:
            self.send_header("Content-Range", f"bytes {part.start}-{part.stop - 1}/{size}")
        part = range(size) if part is None else part
        self.send_header("Content-Length", str(len(part)))
        self.send_header("Content-Type", kind)
        self.end_headers()
        return part

    def _send_empty(self, status: HTTPStatus, content_range: str | None = None) -> None:
        self.send_response(status)
        if content_range is not None:
            self.send_header("Content-Range", content_range)
        self.send_header("Content-Length", "0")
        self.end_headers()


def requested_range(header: str, size: int) -> range | None:
    """Return the bytes that a Range header names in a file of `size` bytes (RFC 9110, section 14).

    Returns:
        None for the whole file: the header is missing, invalid, of another unit or of several
        ranges, or the file is empty. An empty range if the file has no such bytes.
    """
    found = _RANGE.fullmatch(header)
    if found is None or size == 0:
        return None
    first, last = (int(found[name]) if found[name] else None for name in ("first", "last"))
    if first is None:
        return range(max(0, size - last), size) if last is not None else None
    if last is not None and last < first:
        return None
    return range(min(first, size), size if last is None else min(size, last + 1))
