"""Probe servers on loopback: a server must answer as itself.

A port that merely accepts connections may not be a database yet.
"""

from __future__ import annotations

import asyncio
import contextlib
import struct

_ATTEMPT_S = 1.0
_PAUSE_S = 0.02
_ALIVE_WITHIN_S = 5.0
_BODY = struct.pack("!i", 196608) + b"user\0thaw\0database\0postgres\0\0"
_START_UP = struct.pack("!i", len(_BODY) + 4) + _BODY
"""PostgreSQL's start-up message."""


async def until_ready(name: str, port: int) -> None:
    """Return once the server called `name` answers on `port`.

    Does not end by itself: its owner cancels it.
    """
    while True:
        with contextlib.suppress(OSError, TimeoutError, asyncio.IncompleteReadError):
            async with asyncio.timeout(_ATTEMPT_S):
                if await _answers(name, port):
                    return
        await asyncio.sleep(_PAUSE_S)


async def is_alive(name: str, port: int) -> bool:
    """True if the server called `name` answers a new client, even with an error."""
    try:
        async with asyncio.timeout(_ALIVE_WITHIN_S):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            try:
                if name == "postgres":
                    writer.write(_START_UP)
                return bool(await reader.read(1))
            finally:
                writer.close()
    except (OSError, TimeoutError):
        return False


async def _answers(name: str, port: int) -> bool:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        if name == "postgres":
            # 'R' asks for authentication, 'E' says that the server is still starting.
            writer.write(_START_UP)
            return await reader.readexactly(1) == b"R"
        return (await reader.readexactly(4)) == b"INFO"
    finally:
        writer.close()
