"""Static files of the console, built from the folder `console/` by `make console`."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from starlette.datastructures import Headers
from starlette.responses import Response

from shared.errors import NotFound

STATIC = Path(__file__).parent / "static"
MANIFEST = "manifest.json"
PAGE = "index.html"
_KINDS = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_ENCODINGS = (("br", ".br"), ("gzip", ".gz"))
SECURITY_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "form-action 'none'; frame-ancestors 'none'; base-uri 'none'"
    ),
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}


@dataclass(frozen=True)
class _File:
    bodies: dict[str, bytes]
    """By content encoding; "" is the file itself."""
    kind: str
    etag: str


class Assets:
    """The built files, read once. Their names hold a hash of their content, except the page's."""

    def __init__(self, folder: Path = STATIC) -> None:
        names = json.loads((folder / MANIFEST).read_text())["files"]
        self._files = {name: _read(folder / name) for name in names}

    def respond(self, name: str, headers: Headers) -> Response:
        """Return a file in an encoding that the client accepts. Raises `NotFound`."""
        file = self._files.get(name)
        if file is None:
            raise NotFound(f"The console has no file {name[:100]!r}")
        caching = "no-cache" if name == PAGE else "public, max-age=31536000, immutable"
        common = {"cache-control": caching, "etag": file.etag, "vary": "accept-encoding", **SECURITY_HEADERS}
        if file.etag in (tag.strip().removeprefix("W/") for tag in headers.get("if-none-match", "").split(",")):
            return Response(status_code=304, headers=common)
        accepted = {part.partition(";")[0].strip() for part in headers.get("accept-encoding", "").split(",")}
        encoding = next((name for name, _ in _ENCODINGS if name in accepted and name in file.bodies), "")
        if encoding:
            common["content-encoding"] = encoding
        return Response(file.bodies[encoding], headers=common, media_type=file.kind)


def _read(path: Path) -> _File:
    body = path.read_bytes()
    bodies = {"": body}
    for encoding, suffix in _ENCODINGS:
        compressed = path.with_name(path.name + suffix)
        if compressed.exists():
            bodies[encoding] = compressed.read_bytes()
    return _File(bodies, _KINDS[path.suffix], f'"{hashlib.sha256(body).hexdigest()[:32]}"')
