"""Whether a server on loopback answers as itself: a port that merely accepts connections is not yet a database."""

from __future__ import annotations

import asyncio
import contextlib
import struct

_ATTEMPT_S = 1.0
_PAUSE_S = 0.02


async def until_ready(name: str, port: int) -> None:
    """Return once the server called `name` answers on `port`. Does not end by itself: its owner cancels it."""
    while True:
        with contextlib.suppress(OSError, TimeoutError, asyncio.IncompleteReadError):
            async with asyncio.timeout(_ATTEMPT_S):
                if await _answers(name, port):
                    return
        await asyncio.sleep(_PAUSE_S)


async def _answers(name: str, port: int) -> bool:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        if name == "postgres":
            # A start-up message; 'R' asks for authentication, 'E' says that the server is still starting.
            body = struct.pack("!i", 196608) + b"user\0thaw\0database\0postgres\0\0"
            writer.write(struct.pack("!i", len(body) + 4) + body)
            return await reader.readexactly(1) == b"R"
        return (await reader.readexactly(4)) == b"INFO"
    finally:
        writer.close()
