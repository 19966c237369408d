"""An HTTP server over a directory, with configurable faults."""

from __future__ import annotations

import gzip
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit


@dataclass
class Faults:
    """Faults by count or flag, for files that end in `suffix`.

    Counts are used up; flags stay.
    """

    suffix: str = ".safetensors"
    statuses: list[int] = field(default_factory=list)
    retry_after: str | None = None
    cut_after: list[int] = field(default_factory=list)
    stall_after: int | None = None
    stall_from: int | None = None
    wrong_range: bool = False
    no_ranges: bool = False
    compressed: bool = False
    status: int | None = None
    version: str = "1"
    no_validators: bool = False
    damage: Callable[[bytes, int], bytes] | None = None
    piece_delay_s: float = 0.0
    redirect: str | None = None
    no_length: bool = False


@dataclass
class Seen:
    method: str
    path: str
    headers: dict[str, str]


class TierServer:
    """Serves `directory` with ranges, ETags, and `faults`."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.faults = directory, Faults()
        self.contents: dict[str, bytes] = {}
        """Content by path, besides the files."""
        self.requests: list[Seen] = []
        self.sent: dict[str, int] = {}
        self.unblocked = threading.Event()
        self.stalled = threading.Event()
        self.dead = threading.Event()
        """Connections are cut, as if the process had died."""
        server = self

        class Handler(_Handler):
            pass

        Handler.server_of = server
        self._server = _Server(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = False  # closing waits for them
        self.port = self._server.server_port
        self.url = f"http://127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})
        self._thread.start()

    def asked(self, name: str) -> list[Seen]:
        return [r for r in self.requests if r.path.endswith(name)]

    def close(self) -> None:
        self.dead.set()
        self.unblocked.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log nothing, for clients that hang up, or speak TLS."""


class _Handler(BaseHTTPRequestHandler):
    server_of: TierServer
    protocol_version = "HTTP/1.1"
    timeout = 5  # of a connection that a client has left open

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""

    def do_GET(self) -> None:
        server, path = self.server_of, unquote(urlsplit(self.path).path)
        if server.dead.is_set():
            self.close_connection = True
            return None
        server.requests.append(Seen(self.command, path, dict(self.headers.items())))
        file, faults = server.directory / path.lstrip("/"), server.faults
        if not path.endswith(faults.suffix):
            faults = Faults()
        if faults.redirect is not None:
            return self._empty(302, {"Location": faults.redirect + self.path})
        if faults.statuses:
            return self._empty(faults.statuses.pop(0), {"Retry-After": faults.retry_after} if faults.retry_after else {})
        if faults.status is not None:
            return self._empty(faults.status, {})
        if path not in server.contents and not file.is_file():
            return self._empty(404, {})
        return self._file(path, server.contents[path] if path in server.contents else file.read_bytes(), faults)

    def _file(self, path: str, data: bytes, faults: Faults) -> None:
        total, start, status = len(data), 0, 200
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        etag = f'"{total}-{faults.version}"'
        unchanged = self.headers.get("If-Range", etag) == etag
        if asked and not faults.no_ranges and unchanged:
            start, status = int(asked[1]), 206
            if start >= total:
                return self._empty(416, {})
            data = data[start : int(asked[2]) + 1 if asked[2] else None]
        if faults.damage is not None:
            data = faults.damage(data, start)
        if faults.compressed:
            data = gzip.compress(data, 1)
        self.send_response(status)
        if status == 206:
            announced = start + 4096 if faults.wrong_range else start
            self.send_header("Content-Range", f"bytes {announced}-{announced + len(data) - 1}/{total}")
        if not faults.no_validators:
            self.send_header("ETag", etag)
        if faults.compressed:
            self.send_header("Content-Encoding", "gzip")
        if faults.no_length:
            self.send_header("Connection", "close")
            self.close_connection = True
        else:
            self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self._send(path, data, start, faults)
        return None

    def _send(self, path: str, data: bytes, start: int, faults: Faults) -> None:
        cut = faults.cut_after.pop(0) if faults.cut_after else None
        step = 64 * 1024
        if faults.stall_from is not None and start >= faults.stall_from:
            self.server_of.stalled.set()
            self.server_of.unblocked.wait(600)
        try:
            for at in range(0, len(data), step):
                if faults.stall_after is not None and at >= faults.stall_after:
                    self.server_of.stalled.set()
                    self.server_of.unblocked.wait(600)
                piece = data[at : at + step]
                if cut is not None and at + len(piece) > cut:
                    self.wfile.write(piece[: cut - at])
                    self.close_connection = True
                    return
                if self.server_of.dead.wait(faults.piece_delay_s):
                    self.close_connection = True
                    return
                self.wfile.write(piece)
                self.server_of.sent[path] = self.server_of.sent.get(path, 0) + len(piece)
        except OSError:
            self.close_connection = True

    def _empty(self, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", "0")
        self.end_headers()
