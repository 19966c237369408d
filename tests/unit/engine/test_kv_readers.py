"""The listener for engines that read keys and values, without file descriptors or threads."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import threading
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from services.engine.domain.kv_frames import GREETING
from services.engine.kv_transfer import destination, readers
from services.engine.kv_transfer.connection import KvConnection
from services.engine.kv_transfer.destination import KvDestination
from services.engine.kv_transfer.readers import KvReaders, Ticket


@pytest.fixture
async def listening() -> AsyncIterator[KvReaders]:
    found = KvReaders("127.0.0.1", cast(Any, None))
    yield found
    await found.close()


async def test_engines_are_accepted_after_file_descriptors_were_lacking(
    listening: KvReaders, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, failures = asyncio.get_running_loop(), [errno.EMFILE, errno.ECONNABORTED]
    accept = loop.sock_accept

    async def accept_later(listener: socket.socket) -> tuple[socket.socket, object]:
        if failures:
            raise OSError(failures[0], os.strerror(failures.pop(0)))
        return await accept(listener)

    monkeypatch.setattr(loop, "sock_accept", accept_later)
    monkeypatch.setattr(readers, "_RETRY_S", 0.0)
    async with asyncio.timeout(60):
        stream, writer = await asyncio.open_connection(*listening.listen())
        assert await stream.readexactly(len(GREETING)) == GREETING
        writer.close()
        await writer.wait_closed()
    assert failures == []


async def test_a_reader_without_a_thread_takes_no_place(listening: KvReaders, monkeypatch: pytest.MonkeyPatch) -> None:
    ticket = Ticket("00" * 16, "s" * 32, "r", cast(Any, None))
    listening.renew(ticket)
    monkeypatch.setattr(destination, "CONNECT_WITHIN_S", 60.0)
    start = threading.Thread.start

    def refuse(self: threading.Thread) -> None:
        if self.name == "kv-out":
            raise RuntimeError("can't start new thread")
        start(self)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    host, port = listening.listen()
    offer = SimpleNamespace(ticket=ticket.ticket, secret=ticket.secret)
    connect: Any = KvDestination._connect_part
    connection: KvConnection = await asyncio.to_thread(connect, offer, SimpleNamespace(host=host, port=port))
    with pytest.raises((EOFError, OSError)):
        await asyncio.to_thread(connection.get, 0, 60.0)
    connection.close()
    assert not listening.is_read("r")
