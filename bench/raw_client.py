"""An HTTP client that does little itself, and the CPU time of other processes.

Benchmarks of the gateway use it where a client library on the same cores would take more time than
what they measure.
"""

from __future__ import annotations

import json
import re
import selectors
import socket
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any

_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)\r\n", re.IGNORECASE)
_HEAD_END = b"\r\n\r\n"
_TIMEOUT_S = 30.0
_CPU_CLOCK_OF_PROCESS = 2
"""`CPUCLOCK_SCHED` of the kernel, in the lowest bits of a clock's id."""


def cpu_s(pid: int) -> float:
    """Return the CPU seconds that all threads of a process have used, ended ones included."""
    return time.clock_gettime((~pid << 3) | _CPU_CLOCK_OF_PROCESS)


def post_of(path: str, body: Any, headers: Mapping[str, str] | None = None) -> bytes:
    """Encode a POST request with a JSON body."""
    content = json.dumps(body).encode()
    lines = {"host": "127.0.0.1", "content-type": "application/json", "content-length": str(len(content))} | dict(headers or {})
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    return f"POST {path} HTTP/1.1\r\n{head}\r\n".encode() + content


class Connection:
    """One keep-alive connection; a context manager.

    Attributes:
        socket: Its socket.
    """

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=_TIMEOUT_S)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._received = b""

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.socket.close()

    def ask(self, request: bytes) -> bytes:
        """Send a request; return the head of its response once the body is complete.

        Raises:
            RuntimeError: The response is not a success.
        """
        self.socket.sendall(request)
        while (head := self.read()) is None:
            pass
        return head

    def read(self) -> bytes | None:
        """Receive once; return the response's head if its body is complete.

        Raises:
            RuntimeError: The response is not a success.
        """
        received = self.socket.recv(65536)
        if not received:
            raise RuntimeError("the server closed the connection")
        self._received += received
        head, separator, body = self._received.partition(_HEAD_END)
        length = _LENGTH.search(head + b"\r\n") if separator else None
        if length is None or len(body) < int(length[1]):
            return None
        if not head.startswith(b"HTTP/1.1 200 "):
            raise RuntimeError(self._received.decode(errors="replace"))
        self._received = b""
        return head


def send_load(port: int, request: bytes, clients: int, seconds: float) -> tuple[int, float]:
    """Ask with some clients, each of which asks again when it has its response.

    Returns:
        The responses, and the seconds until the last one: none is left behind.
    """
    selector = selectors.DefaultSelector()
    connections = [Connection(port) for _ in range(clients)]
    try:
        begun = time.perf_counter()
        for connection in connections:
            selector.register(connection.socket, selectors.EVENT_READ, connection)
            connection.socket.sendall(request)
        count, waiting = 0, clients
        while waiting:
            for key, _ in selector.select(_TIMEOUT_S):
                if key.data.read() is None:
                    continue
                count += 1
                if time.perf_counter() - begun < seconds:
                    key.data.socket.sendall(request)
                else:
                    waiting -= 1
        return count, time.perf_counter() - begun
    finally:
        for connection in connections:
            connection.socket.close()
