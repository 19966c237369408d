"""The small HTTP client, against well-behaved and faulty servers."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from services.enginehost.http1 import Address, BodyStream, Client, HttpError, HttpRequest, TooLarge
from shared.errors import BodyLost
from tests.unit.enginehost.http_servers import says, serving

GET = HttpRequest("GET", "/")


@pytest.mark.parametrize(
    ("answer", "status", "body"),
    [
        (b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok", 200, b"ok"),
        (b"HTTP/1.1 404 No\r\ntransfer-encoding: chunked\r\n\r\n2\r\nab\r\n1\r\nc\r\n0\r\n\r\n", 404, b"abc"),
        (b"HTTP/1.1 200 OK\r\n\r\nuntil the end", 200, b"until the end"),
        (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 204 None\r\ncontent-length: 0\r\n\r\n", 204, b""),
    ],
)
async def test_answers_in_every_framing(answer: bytes, status: int, body: bytes) -> None:
    async with serving(says(answer)) as client:
        assert await client.ask(GET) == (status, body)


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"not http at all\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\ncut",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nab",
    ],
)
async def test_a_broken_answer_is_an_error(answer: bytes) -> None:
    async with serving(says(answer)) as client:
        with pytest.raises(HttpError):
            await client.ask(GET)


async def test_a_response_to_head_has_no_body_whatever_its_length() -> None:
    async with serving(says(b"HTTP/1.1 404 Not Found\r\ncontent-length: 30\r\n\r\n")) as client:
        assert await client.ask(HttpRequest("HEAD", "/")) == (404, b"")


async def test_requests_wait_while_the_backlog_of_a_unix_socket_is_full(tmp_path: Path) -> None:
    """All requests of a queue are sent at once when an engine becomes ready."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")
        await writer.drain()
        writer.close()

    path = str(tmp_path / "engine.sock")
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(1)
    client = Client(Address(path=path))
    asking = [asyncio.create_task(client.ask(GET)) for _ in range(20)]
    for _ in range(5):  # all of them have tried to connect
        await asyncio.sleep(0)
    server = await asyncio.start_unix_server(answer, sock=listener)
    try:
        async with asyncio.timeout(60):
            assert await asyncio.gather(*asking) == [(200, b"ok")] * 20
    finally:
        server.close()


async def test_missing_server_is_reported(tmp_path: Path) -> None:
    with pytest.raises(HttpError, match="no connection"):
        await Client(Address(path=str(tmp_path / "none.sock"))).ask(GET)


async def test_response_over_the_limit_is_refused() -> None:
    async with serving(says(b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * 5000)) as client:
        with pytest.raises(TooLarge):
            await client.ask(GET, limit=1000)


async def test_the_server_sees_the_close_and_pieces_arrive_as_sent() -> None:
    left = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\none\r\n")
        await writer.drain()
        assert await reader.read() == b""
        left.set()

    async with serving(serve) as client:
        response = await client.send(GET)
        assert await response.read() == b"one"
        response.close()
        await asyncio.wait_for(left.wait(), 60)


async def test_slow_reader_applies_backpressure_to_the_sender() -> None:
    sent = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        for _ in range(400):
            writer.write(b"x" * (1 << 18))
            await writer.drain()
            sent += 1 << 18

    async with serving(serve) as client:
        response = await client.send(GET)
        for _ in range(200):
            await asyncio.sleep(0)
        assert sent < 60 << 20
        assert len(await response.read_all(limit=1 << 30)) == 400 << 18


async def test_a_line_break_in_a_header_is_refused() -> None:
    async with serving(says(b"HTTP/1.1 200 OK\r\n\r\n")) as client:
        with pytest.raises(HttpError, match="line break"):
            await client.ask(HttpRequest("GET", "/", headers={"x": "a\r\nb: c"}))


async def parts_of(*parts: bytes) -> AsyncIterator[bytes]:
    for part in parts:
        yield part


def streamed(size: int, *parts: bytes) -> HttpRequest:
    return HttpRequest("POST", "/", stream=BodyStream(size, lambda: parts_of(*parts)))


async def test_a_streamed_body_arrives_whole() -> None:
    parts = [bytes([i]) * 300_000 for i in range(20)]

    async def echo_size(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        body = await reader.readexactly(6_000_000)
        answer = b"same" if body == b"".join(parts) else b"else"
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\n" + answer)
        await writer.drain()

    async with serving(echo_size) as client:
        assert await client.ask(streamed(6_000_000, *parts)) == (200, b"same")


async def test_a_slow_peer_holds_the_stream_back() -> None:
    read = asyncio.Event()
    taken = 0

    async def many() -> AsyncIterator[bytes]:
        nonlocal taken
        for _ in range(200):
            taken += 1
            yield b"x" * 1_000_000

    async def slow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read.wait()
        await reader.readexactly(200_000_000)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
        await writer.drain()

    async with serving(slow) as client:
        request = HttpRequest("POST", "/", stream=BodyStream(200_000_000, many))
        asking = asyncio.create_task(client.ask(request))
        before = -1
        while before != taken:  # no progress in a hundred turns of the event loop: the peer's buffers are full
            before = taken
            for _ in range(100):
                await asyncio.sleep(0)
        assert 0 < taken < 100
        read.set()
        assert await asking == (200, b"")


async def test_an_early_answer_is_read_while_the_body_is_sent() -> None:
    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 413 No\r\ncontent-length: 2\r\n\r\nno")
        await writer.drain()
        await reader.read()

    async def forever() -> AsyncIterator[bytes]:
        while True:
            yield b"x" * 65536

    async with serving(refuse) as client:
        assert await client.ask(HttpRequest("POST", "/", stream=BodyStream(1 << 40, forever))) == (413, b"no")


async def test_an_error_of_the_stream_is_that_of_the_request() -> None:
    async def lost() -> AsyncIterator[bytes]:
        yield b"x"
        raise BodyLost("gone")

    async def wait(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    async with serving(wait) as client:
        with pytest.raises(BodyLost, match="gone"):
            await client.ask(HttpRequest("POST", "/", stream=BodyStream(100, lost)))


async def test_a_peer_that_closes_ends_the_stream() -> None:
    ended = asyncio.Event()

    async def forever() -> AsyncIterator[bytes]:
        try:
            while True:
                yield b"x" * 65536
        finally:
            ended.set()

    async def close(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(100_000)

    async with serving(close) as client:
        with pytest.raises(HttpError, match="closed early"):
            await client.ask(HttpRequest("POST", "/", stream=BodyStream(1 << 40, forever)))
    await ended.wait()
