"""A fake Hugging Face hub with the API that huggingface_hub uses.

It serves revisions, trees, and files with ranges.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class FakeHub:
    """Serves the files of `directory` as repository `repo` at one commit, branch main."""

    def __init__(self, directory: Path, repo: str = "org/model", *, host: str = "127.0.0.1") -> None:
        self.directory, self.repo = directory, repo
        self.status: int | None = None
        self.error_code = ""
        self.token: str | None = None
        self.ranges = True
        self.requests: list[tuple[str, str]] = []
        self.sent: dict[str, int] = {}
        self.damage = False
        self.hold_after: int | None = None
        self.holding = threading.Event()
        self.unblocked = threading.Event()
        hub = self

        class Handler(_Handler):
            pass

        Handler.hub = hub
        self._server = ThreadingHTTPServer((host, 0), Handler)
        self._server.daemon_threads = True
        self.port = self._server.server_port
        self.url = f"http://127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05})
        self._thread.start()

    def close(self) -> None:
        self.unblocked.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def files(self) -> dict[str, Path]:
        return {str(p.relative_to(self.directory)): p for p in sorted(self.directory.rglob("*")) if p.is_file()}


def oid(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _sibling(name: str, path: Path) -> dict[str, Any]:
    size = path.stat().st_size
    large = {"lfs": {"sha256": oid(path), "size": size, "pointerSize": 134}} if name.endswith(".safetensors") else {}
    return {"rfilename": name, "size": size, "blobId": oid(path)[:40], **large}


class _Handler(BaseHTTPRequestHandler):
    hub: FakeHub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""

    def do_HEAD(self) -> None:
        self._respond(body=False)

    def do_GET(self) -> None:
        self._respond(body=True)

    def _respond(self, *, body: bool) -> None:
        hub, path = self.hub, unquote(urlsplit(self.path).path)
        hub.requests.append((self.command, path))
        if hub.status is not None:
            return self._fail(hub.status, hub.error_code)
        if hub.token is not None and self.headers.get("Authorization") != f"Bearer {hub.token}":
            return self._fail(401, "GatedRepo")
        if found := re.fullmatch(rf"/api/models/{hub.repo}(/revision/(?P<revision>[^/]+))?", path):
            return self._info(found["revision"])
        if found := re.fullmatch(rf"/api/models/{hub.repo}/tree/(?P<revision>[^/]+)/?", path):
            return self._tree()
        if found := re.fullmatch(rf"/{hub.repo}/resolve/(?P<revision>[^/]+)/(?P<name>.+)", path):
            return self._file(found["name"], body=body)
        return self._fail(404, "RepoNotFound")

    def _fail(self, status: int, code: str) -> None:
        self.send_response(status)
        if code:
            self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _json(self, value: Any) -> None:
        data = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _info(self, revision: str | None) -> None:
        if revision not in (None, "main", COMMIT):
            return self._fail(404, "RevisionNotFound")
        siblings = [_sibling(n, p) for n, p in self.hub.files().items()]
        return self._json({"id": self.hub.repo, "modelId": self.hub.repo, "sha": COMMIT, "siblings": siblings, "tags": []})

    def _tree(self) -> None:
        entries = [{"type": "file", "path": n, "size": p.stat().st_size, "oid": oid(p)[:40]} for n, p in self.hub.files().items()]
        self._json(entries)

    def _file(self, name: str, *, body: bool) -> None:
        path = self.hub.files().get(name)
        if path is None:
            return self._fail(404, "EntryNotFound")
        data, start, status = path.read_bytes(), 0, 200
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        total = len(data)
        if asked and self.hub.ranges and body:
            start, status = int(asked[1]), 206
            data = data[start : int(asked[2]) + 1 if asked[2] else None]
        if self.hub.damage and name.endswith(".safetensors") and start + len(data) == total:
            data = data[:-1] + bytes([data[-1] ^ 1])
        self.send_response(status)
        self.send_header("ETag", f'"{oid(path)}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Accept-Ranges", "bytes")
        if status == 206:
            self.send_header("Content-Range", f"bytes {start}-{start + len(data) - 1}/{total}")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if body:
            self._send(name, data)
        return None

    def _send(self, name: str, data: bytes) -> None:
        step = 256 * 1024
        try:
            for at in range(0, len(data), step):
                if self.hub.hold_after is not None and at >= self.hub.hold_after:
                    self.hub.holding.set()
                    self.hub.unblocked.wait(600)
                self.wfile.write(data[at : at + step])
                self.hub.sent[name] = self.hub.sent.get(name, 0) + len(data[at : at + step])
        except OSError:  # the client has read enough
            self.close_connection = True
