"""The connections of the server for other loaders."""

from __future__ import annotations

import contextlib
import http.client
import threading

import pytest

from services.loader.adapters import peer_server
from services.loader.adapters.peer_server import PeerServer


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
