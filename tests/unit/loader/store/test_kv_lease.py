"""The client of a KV cache that borrows pages, with a loader of a few lines."""

from __future__ import annotations

import os
import queue
import socket
import threading
from pathlib import Path

from shared.contracts.base import Message
from shared.contracts.loader_socket import BORROWER_LINE, SocketBorrowing, SocketDemand, SocketLent, SocketReturn
from weights.kv_lease import KvLease, Lent, Shrink
from weights.pool.memory import PoolMemory
from weights.store.units import PAGE_BYTES

CONNECTIONS = 2


def lend_a_page(listener: socket.socket) -> None:
    """Lend a page in each of the first connections, and close them."""
    for number in range(CONNECTIONS):
        connection, _ = listener.accept()
        with connection, connection.makefile("rb") as lines:
            lines.readline()
            answers: list[Message] = [SocketBorrowing(file="", total_pages=8), SocketLent(number=1, pages=(number,))]
            for answer in answers:
                connection.sendall(answer.model_dump_json().encode() + b"\n")
            while lines.readline():
                pass


class BrokenOnce:
    """A GPU's memory that fails for the first page."""

    def __init__(self) -> None:
        self.calls = 0

    def add(self, pages: int) -> int:
        self.calls += 1
        if self.calls == 1:
            raise RuntimeError("CUDA error")
        return pages


def test_error_in_the_leases_thread_does_not_end_it(tmp_path: Path) -> None:
    """The cache would wait for pages for ever."""
    path = tmp_path / "loader.sock"
    events: queue.Queue[Lent | Shrink] = queue.Queue()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(path))
        listener.listen()
        loader = threading.Thread(target=lend_a_page, args=(listener,), daemon=True)
        loader.start()
        lease = KvLease(path, "cuda:0", "i", 1, events.put, memory=BrokenOnce())
        try:
            event = events.get(timeout=30)
        finally:
            lease.close()
        loader.join(30)
    assert isinstance(event, Lent)
    assert event.more == 1


PAGES = 3


class HangsUpOnce:
    """A loader that lends pages over its first connection, and ends that one."""

    def __init__(self, listener: socket.socket, file: str) -> None:
        self.asked: queue.Queue[SocketDemand | SocketReturn] = queue.Queue()
        self.may_hang_up = threading.Event()
        self._listener, self._file = listener, file
        self.thread = threading.Thread(target=self._serve, daemon=True)
        self.thread.start()

    def _serve(self) -> None:
        for is_first in (True, False):
            connection, _ = self._listener.accept()
            with connection, connection.makefile("rb") as lines:
                lines.readline()
                _send(connection, SocketBorrowing(file=self._file, total_pages=8))
                while line := lines.readline():
                    self.asked.put(BORROWER_LINE.validate_json(line))
                    if is_first:
                        _send(connection, SocketLent(number=1, pages=tuple(range(PAGES))))
                        self.may_hang_up.wait(30)
                        break


def _send(connection: socket.socket, message: Message) -> None:
    connection.sendall(message.model_dump_json().encode() + b"\n")


def test_pages_of_an_ended_connection_are_not_borrowed_twice(tmp_path: Path) -> None:
    """The loader has ended the connection and continues: its file is the same."""
    path, name = tmp_path / "loader.sock", f"thaw-test{os.getpid()}-lease"
    events: queue.Queue[Lent | Shrink] = queue.Queue()
    pool = PoolMemory(name, 8 * PAGE_BYTES, chunk_bytes=PAGE_BYTES)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(path))
        listener.listen()
        loader = HangsUpOnce(listener, name)
        lease = KvLease(path, "cpu:1", "i", PAGES, events.put)
        try:
            assert loader.asked.get(timeout=30) == SocketDemand(number=1, pages=PAGES)
            assert events.get(timeout=30) == Lent(PAGES, is_answer=True, turn=None)
            loader.may_hang_up.set()
            assert loader.asked.get(timeout=30) == SocketDemand(number=2, pages=0)
            lease.give_back(1)
            assert loader.asked.get(timeout=30) == SocketDemand(number=3, pages=1), "it cannot be taken back over this connection"
        finally:
            lease.close()
            pool.close(unlink=True)
        loader.thread.join(30)
