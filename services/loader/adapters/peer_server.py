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
_RANGE = re.compile(r"bytes=(\d+)-(\d*)")
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
        start, end = self._range(len(data))
        self._head(start, end, len(data), "application/json")
        self.wfile.write(data[start:end])

    def _file(self, directory: Path, name: str) -> None:
        from weights.formats.root import check_inside

        try:
            check_inside(directory, directory / name)
            file = (directory / name).open("rb")
        except (OSError, CheckpointInvalid):
            return self._send_empty(HTTPStatus.NOT_FOUND)
        with file:
            size = os.fstat(file.fileno()).st_size
            start, end = self._range(size)
            if start >= size and size:
                return self._send_empty(HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE)
            self._head(start, end, size, "application/octet-stream")
            if end > start:
                self.wfile.flush()
                self.connection.sendfile(file, start, end - start)
        return None

    def _send_resident(self, resident: ResidentFiles, name: str) -> None:
        """Send a file from host memory. The connection is cut if the weights leave it meanwhile."""
        size = resident.size(name) or 0
        start, end = self._range(size)
        if start >= size and size:
            return self._send_empty(HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE)
        self._head(start, end, size, "application/octet-stream")
        buffer = memoryview(bytearray(min(_SEND_BYTES, max(0, end - start))))
        while start < end:
            part = buffer[: end - start]
            if not resident.read(name, start, part):
                self.close_connection = True
                return None
            self.wfile.write(part)
            start += len(part)
        return None

    def _range(self, size: int) -> tuple[int, int]:
        asked = _RANGE.fullmatch(self.headers.get("Range", ""))
        if asked is None:
            return 0, size
        return int(asked[1]), min(size, int(asked[2]) + 1) if asked[2] else size

    def _head(self, start: int, end: int, size: int, kind: str) -> None:
        partial = "Range" in self.headers
        self.send_response(HTTPStatus.PARTIAL_CONTENT if partial else HTTPStatus.OK)
        if partial:
            self.send_header("Content-Range", f"bytes {start}-{end - 1}/{size}")
        self.send_header("Content-Length", str(end - start))
        self.send_header("Content-Type", kind)
        self.end_headers()

    def _send_empty(self, status: HTTPStatus) -> None:
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self.end_headers()
