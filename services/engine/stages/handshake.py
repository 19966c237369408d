"""Begin a connection between two stages: both prove that they know the group's secret."""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
from typing import Any

from services.engine.domain.stage_frames import GREETING, is_proven, prove
from shared.contracts.stages import Stage
from shared.engines.peer_sockets import configure
from shared.engines.secret_proof import NONCE_BYTES, PROOF_BYTES

log = logging.getLogger(__name__)
WITHIN_S = 5.0
"""Seconds that a peer has for its part of the handshake."""
MAX_CALLERS = 16
"""Connections without a proof yet; further ones are closed at once."""


class NotProven(Exception):
    """The other side does not know the group's secret, or is no stage."""


async def call(host: str, port: int, stage: Stage) -> socket.socket:
    """Connect to the next stage.

    Raises:
        NotProven: It is not that stage.
        OSError: It cannot be reached.
        TimeoutError: It does not answer within `WITHIN_S`.
    """
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    family, kind, protocol, _, address = found[0]
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setblocking(False)
        configure(sock)
        async with asyncio.timeout(WITHIN_S):
            await loop.sock_connect(sock, address)
            greeting = await _receive(sock, len(GREETING) + NONCE_BYTES)
            if not greeting.startswith(GREETING):
                raise NotProven(f"{host}:{port} is no stage of this version")
            nonces = greeting[len(GREETING) :], secrets.token_bytes(NONCE_BYTES)
            await loop.sock_sendall(sock, nonces[1] + prove("caller", stage, stage.index, nonces))
            if not is_proven(await _receive(sock, PROOF_BYTES), "listener", stage, stage.index, nonces):
                raise NotProven(f"{host}:{port} does not know the secret of group {stage.group_id}")
        return sock
    except BaseException:
        sock.close()
        raise


async def accept(listener: socket.socket, stage: Stage) -> socket.socket:
    """Return the connection of the stage before, among all that connect. Never gives up."""
    loop = asyncio.get_running_loop()
    proven: asyncio.Future[socket.socket] = loop.create_future()
    callers: set[asyncio.Task[None]] = set()
    try:
        while not proven.done():
            accepting = asyncio.ensure_future(loop.sock_accept(listener))
            waits: set[asyncio.Future[Any]] = {accepting, proven}
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            if proven.done():
                if accepting.done() and accepting.exception() is None:
                    accepting.result()[0].close()
                accepting.cancel()
                break
            sock, address = accepting.result()
            if len(callers) >= MAX_CALLERS:
                sock.close()
                continue
            task = asyncio.create_task(_answer(sock, address, stage, proven), name="stage-caller")
            callers.add(task)
            task.add_done_callback(callers.discard)
        return proven.result()
    finally:
        for task in tuple(callers):
            task.cancel()


async def _answer(sock: socket.socket, address: object, stage: Stage, proven: asyncio.Future[socket.socket]) -> None:
    loop = asyncio.get_running_loop()
    is_kept = False
    try:
        sock.setblocking(False)
        configure(sock)
        nonce = secrets.token_bytes(NONCE_BYTES)
        async with asyncio.timeout(WITHIN_S):
            await loop.sock_sendall(sock, GREETING + nonce)
            answer = await _receive(sock, NONCE_BYTES + PROOF_BYTES)
            nonces = nonce, answer[:NONCE_BYTES]
            if not is_proven(answer[NONCE_BYTES:], "caller", stage, stage.previous_index, nonces):
                raise NotProven("wrong proof")
            await loop.sock_sendall(sock, prove("listener", stage, stage.previous_index, nonces))
        if not proven.done():
            proven.set_result(sock)
            is_kept = True
    except (NotProven, OSError, TimeoutError) as e:
        log.warning("refused a connection to a stage", extra={"group": stage.group_id, "caller": str(address), "error": repr(e)})
    finally:
        if not is_kept:
            sock.close()


async def _receive(sock: socket.socket, count: int) -> bytes:
    loop, data = asyncio.get_running_loop(), b""
    while len(data) < count:
        got = await loop.sock_recv(sock, count - len(data))
        if not got:
            raise NotProven("the other side closed the connection")
        data += got
    return data
