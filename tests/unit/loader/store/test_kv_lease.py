"""The client of a KV cache that borrows pages, with a loader of a few lines."""

from __future__ import annotations

import queue
import socket
import threading
from pathlib import Path

from shared.contracts.base import Message
from shared.contracts.loader_socket import SocketBorrowing, SocketLent
from weights.kv_lease import KvLease, Lent, Shrink

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
