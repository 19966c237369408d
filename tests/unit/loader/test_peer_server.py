"""The server for other loaders: its connections, and the ranges of RFC 9110 that it serves."""

from __future__ import annotations

import contextlib
import http.client
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from services.loader.adapters import peer_server
from services.loader.adapters.peer_server import PeerServer
from services.loader.adapters.resident import ResidentFiles
from weights.cache.journal import FileHead
from weights.cache.store import EntryRecord

ON_DISK, IN_MEMORY = "0" * 16, "1" * 16
DIGITS = b"0123456789"


def ask(server: PeerServer) -> int:
    host, port = server.url.removeprefix("http://").split(":")
    with contextlib.closing(http.client.HTTPConnection(host, int(port), timeout=60)) as connection:
        connection.request("GET", "/models/0123456789abcdef")
        return connection.getresponse().status


def test_connection_without_a_thread_leaves_its_slot_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_server, "_CONNECTIONS", 1)
    server = PeerServer("127.0.0.1", 0, lambda _: contextlib.nullcontext())
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if threading.current_thread().name == "peers":
            raise RuntimeError("can't start new thread")
        start(thread)

    with contextlib.closing(server):
        with monkeypatch.context() as full:
            full.setattr(threading.Thread, "start", refuse)
            with pytest.raises((ConnectionError, http.client.HTTPException)):
                ask(server)
        assert ask(server) == http.HTTPStatus.UNAUTHORIZED


class Resident:
    """A file in host memory."""

    def size(self, name: str) -> int | None:
        return len(DIGITS) if name == "digits" else None

    def read(self, name: str, offset: int, into: memoryview) -> bool:
        into[:] = DIGITS[offset : offset + len(into)]
        return True


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PeerServer]:
    """A server with one model on the disk and one in host memory."""
    directory: Path = tmp_path_factory.mktemp("model")
    files = {"digits": DIGITS, "empty": b""}
    for name, content in files.items():
        (directory / name).write_bytes(content)
    heads = tuple(FileHead(name=name, size=len(content), version="1") for name, content in files.items())
    record = EntryRecord(revision=ON_DISK, source="hf://org/model", files=heads)
    resident = cast(ResidentFiles, Resident())
    server = PeerServer(
        "127.0.0.1",
        0,
        lambda revision: contextlib.nullcontext((directory, record) if revision == ON_DISK else None),
        lambda revision: resident if revision == IN_MEMORY else None,
    )
    with contextlib.closing(server):
        yield server


def get(server: PeerServer, path: str, **headers: str) -> tuple[int, str | None, bytes]:
    """Return status, Content-Range and body."""
    host, port = server.url.removeprefix("http://").split(":")
    with contextlib.closing(http.client.HTTPConnection(host, int(port), timeout=60)) as connection:
        given: dict[str, Any] = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request("GET", f"/models/{path}", headers={"Authorization": f"Bearer {server.token}", **given})
        response = connection.getresponse()
        return response.status, response.getheader("Content-Range"), response.read()


@pytest.mark.parametrize("revision", [ON_DISK, IN_MEMORY], ids=["disk", "memory"])
@pytest.mark.parametrize(
    ("asked", "first", "last"),
    [
        ("bytes=2-4", 2, 4),
        ("bytes=9-9", 9, 9),
        ("bytes=7-", 7, 9),
        ("bytes=7-99", 7, 9),
        ("bytes=-3", 7, 9),
        ("bytes=-30", 0, 9),
        ("Bytes= 0-0", 0, 0),
    ],
)
def test_range_is_sent_as_far_as_the_file_has_it(serving: PeerServer, revision: str, asked: str, first: int, last: int) -> None:
    found = get(serving, f"{revision}/digits", Range=asked)
    assert found == (http.HTTPStatus.PARTIAL_CONTENT, f"bytes {first}-{last}/10", DIGITS[first : last + 1])


@pytest.mark.parametrize("revision", [ON_DISK, IN_MEMORY], ids=["disk", "memory"])
@pytest.mark.parametrize("asked", ["bytes=10-", "bytes=10-12", "bytes=-0"])
def test_range_without_a_byte_of_the_file_gets_416(serving: PeerServer, revision: str, asked: str) -> None:
    found = get(serving, f"{revision}/digits", Range=asked)
    assert found == (http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE, "bytes */10", b"")


@pytest.mark.parametrize("revision", [ON_DISK, IN_MEMORY], ids=["disk", "memory"])
@pytest.mark.parametrize(
    "asked", ["bytes=9-3", "bytes=-", "bytes=", "bytes=a-b", "bytes=1", "lines=1-2", "bytes=0-1,4-5", f"bytes={'9' * 5000}-"]
)
def test_invalid_range_is_ignored(serving: PeerServer, revision: str, asked: str) -> None:
    assert get(serving, f"{revision}/digits", Range=asked) == (http.HTTPStatus.OK, None, DIGITS)


def test_range_of_an_empty_file_and_of_another_version_is_ignored(serving: PeerServer) -> None:
    assert get(serving, f"{ON_DISK}/empty", Range="bytes=0-9") == (http.HTTPStatus.OK, None, b"")
    assert get(serving, f"{ON_DISK}/digits", Range="bytes=2-4", If_Range='"v1"') == (http.HTTPStatus.OK, None, DIGITS)


def test_listing_has_ranges_too(serving: PeerServer) -> None:
    whole = get(serving, ON_DISK)[2]
    assert get(serving, ON_DISK, Range="bytes=-4")[2] == whole[-4:]
    assert get(serving, ON_DISK, Range=f"bytes={len(whole)}-")[:2] == (416, f"bytes */{len(whole)}")


def test_connection_ends_with_a_file_that_was_truncated_meanwhile(tmp_path: Path) -> None:
    """The client would wait for the missing bytes until its patience ends."""
    size, path = 1 << 28, tmp_path / "large"
    path.touch()
    os.truncate(path, size)
    record = EntryRecord(revision=ON_DISK, source="/m", files=(FileHead(name="large", size=size, version="1"),))
    server = PeerServer("127.0.0.1", 0, lambda _: contextlib.nullcontext((tmp_path, record)))
    with contextlib.closing(server):
        host, port = server.url.removeprefix("http://").split(":")
        with contextlib.closing(http.client.HTTPConnection(host, int(port), timeout=10)) as connection:
            connection.request("GET", f"/models/{ON_DISK}/large", headers={"Authorization": f"Bearer {server.token}"})
            response = connection.getresponse()
            response.read(1)
            os.truncate(path, 1)
            with pytest.raises(http.client.IncompleteRead):
                response.read()
