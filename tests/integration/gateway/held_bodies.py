"""Bodies that a gateway holds for an engine's host: their parts and files."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from pathlib import Path

from services.enginehost.http1 import HttpRequest
from services.enginehost.server.held_body import HeldBodyReader
from shared.contracts import subjects
from shared.contracts.request_body import HeldBody, ReadBodyPart
from shared.messaging import Mesh
from shared.messaging.body_parts import decode_body_part
from tests.integration.gateway.conftest import Served, until
from tests.support.fake_engine import Run


async def received(mesh: Mesh, run: Run) -> bytes:
    """Return the body that a host sends to its engine."""
    held = run.request.held
    assert held is not None
    outline = json.dumps(run.request.body).encode() if held.marker else b""
    stream = HeldBodyReader(mesh).attach(HttpRequest("POST", "/", outline), held).stream
    assert stream is not None
    body = b"".join([part async for part in stream.read()])
    assert len(body) == stream.size_bytes
    return body


def open_bodies(home: Path) -> int:
    """Return the files of bodies that are open in this process, which has the gateway."""
    found = 0
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            found += os.readlink(entry).startswith(str(home))  # noqa: PTH115 - the target is no path
    return found


async def all_closed(served: Served) -> None:
    directory = served.settings.state / "gateway" / "bodies"

    async def closed() -> bool:
        return await asyncio.to_thread(open_bodies, directory) == 0

    await until(closed)


async def read_part(mesh: Mesh, held: HeldBody, offset: int = 0) -> bytes:
    request = ReadBodyPart(body_id=held.body_id, offset=offset)
    return decode_body_part(await mesh.fetch(subjects.body_parts(held.gateway_id), request), offset)
