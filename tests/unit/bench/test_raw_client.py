"""The benchmarks' client of few instructions, against a server that cuts its responses anywhere."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest

from bench.raw_client import Connection, cpu_s, post_of
from shared.ports import free_port

REQUEST = post_of("/x", {"a": 1}, {"authorization": "Bearer k"})
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\nContent-Length: 6"


@contextmanager
def serving(pieces: Sequence[bytes]) -> Iterator[int]:
    """Answer every request with the pieces, each in a packet of its own."""
    # Not an ephemeral port: a client of an earlier server could be the one that is served.
    listener = socket.create_server(("127.0.0.1", free_port()))

    def serve() -> None:
        connection, _ = listener.accept()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with connection:
            while connection.recv(65536):
                for piece in pieces:
                    connection.sendall(piece)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        thread.join()
        listener.close()


@pytest.mark.parametrize("cut", [1, 20, len(HEAD) + 2, len(HEAD) + 7])
def test_a_response_is_complete_with_its_last_byte(cut: int) -> None:
    whole = HEAD + b"\r\n\r\nwhole."
    with serving([whole[:cut], whole[cut:]]) as port, Connection(port) as connection:
        assert [connection.ask(REQUEST) for _ in range(3)] == [HEAD] * 3


def test_a_failed_request_is_an_error() -> None:
    with (
        serving([b"HTTP/1.1 429 Too Many Requests\r\ncontent-length: 2\r\n\r\n{}"]) as port,
        Connection(port) as connection,
        pytest.raises(RuntimeError, match="429"),
    ):
        connection.ask(REQUEST)


def test_the_cpu_time_of_a_process_is_that_of_its_own_clock() -> None:
    before, other = time.process_time(), cpu_s(os.getpid())
    after = time.process_time()
    assert before <= other <= after
