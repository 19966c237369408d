"""Another process takes the engine's port before the engine binds it."""

from __future__ import annotations

import asyncio
import socket
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from shared.contracts.models import ModelCard
from tests.support.hosted import MIB, Hosts, hosted_card

_LATE = """\
echo >"{place}/$1.asked"
until [ -e "{place}/$1.go" ]; do sleep 0.02; done
{bind}
"""


def late_card(place: Path, bind: str = "") -> ModelCard:
    """Return a card of an engine that reports its port and waits before it binds it.

    Args:
        bind: Code to run instead.
    """
    bind = bind or f'exec {sys.executable} -m tests.support.fake_openai --port "$1"'
    script = _LATE.format(place=place, bind=bind)
    return hosted_card("engine://m", command=["sh", "-c", script, "engine", "{port}"], memory=MIB)


class Healthy(BaseHTTPRequestHandler):
    """A healthy server of another owner."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def thief() -> Iterator[list[Any]]:
    """Yield a list for taken ports; close them at the end."""
    taken: list[Any] = []
    yield taken
    for held in taken:
        held.close() if isinstance(held, socket.socket) else (held.shutdown(), held.server_close())


async def asked(place: Path, known: set[str]) -> str:
    """Return the next port that the engine is given."""
    async with asyncio.timeout(60):
        while True:
            for path in place.glob("*.asked"):
                if path.stem not in known:
                    known.add(path.stem)
                    return path.stem
            await asyncio.sleep(0.02)


async def test_engine_with_a_taken_port_gets_another_one(hosts: Hosts, tmp_path: Path, thief: list[Any]) -> None:
    start = hosts.host(late_card(tmp_path))
    known: set[str] = set()
    first = await asked(tmp_path, known)
    thief.append(socket.create_server(("127.0.0.1", int(first))))
    (tmp_path / f"{first}.go").touch()
    second = await asked(tmp_path, known)
    (tmp_path / f"{second}.go").touch()
    report = await hosts.settled(start.instance_id)
    assert report.state == "ready", report.error
    assert (await hosts.request(start.instance_id, "chat", messages=[], max_tokens=2)).status == 200
    assert len([s for s in report.phases if s.phase.value == "init"]) == 2, "both attempts are reported"


async def test_start_fails_after_three_taken_ports(hosts: Hosts, tmp_path: Path, thief: list[Any]) -> None:
    start = hosts.host(late_card(tmp_path))
    known: set[str] = set()
    for _ in range(3):
        port = await asked(tmp_path, known)
        thief.append(socket.create_server(("127.0.0.1", int(port))))
        (tmp_path / f"{port}.go").touch()
    report = await hosts.settled(start.instance_id)
    assert report.state == "failed"
    assert report.error is not None
    assert report.error.message == "The engine's port was taken 3 times in a row. Start the instance again"
    await hosts.left_nothing(start.instance_id)


async def test_failure_of_the_second_start_is_not_taken_for_that_of_the_first(
    hosts: Hosts, tmp_path: Path, thief: list[Any]
) -> None:
    """Both starts write to one log."""
    run = f'exec {sys.executable} -m tests.support.fake_openai --port "$1"'
    once = f'if [ -e "{tmp_path}/began" ]; then echo "no checkpoint found" >&2; exit 3; fi; touch "{tmp_path}/began"; {run}'
    start = hosts.host(late_card(tmp_path, once))
    known: set[str] = set()
    first = await asked(tmp_path, known)
    thief.append(socket.create_server(("127.0.0.1", int(first))))
    (tmp_path / f"{first}.go").touch()
    second = await asked(tmp_path, known)
    (tmp_path / f"{second}.go").touch()
    report = await hosts.settled(start.instance_id)
    assert report.state == "failed"
    assert report.error is not None
    assert "exit status 3" in report.error.message
    assert report.error.message.endswith("the end of its log:\nno checkpoint found"), "nothing of the first start"


async def test_health_of_another_process_is_not_the_engines(hosts: Hosts, tmp_path: Path, thief: list[Any]) -> None:
    """The health of another process on the port does not count as the engine's.

    The engine does not notice; the host checks the port's owner before it sends a request.
    """
    start = hosts.host(late_card(tmp_path, f'exec {sys.executable} -m tests.support.fake_openai --port "$1" --ready-after 2'))
    known: set[str] = set()
    first = await asked(tmp_path, known)
    other = ThreadingHTTPServer(("127.0.0.1", int(first)), Healthy)
    thief.append(other)
    threading.Thread(target=other.serve_forever, args=(0.05,), daemon=True).start()
    (tmp_path / f"{first}.go").touch()
    second = await asked(tmp_path, known)
    (tmp_path / f"{second}.go").touch()
    report = await hosts.settled(start.instance_id)
    assert report.state == "ready", report.error
    assert (await hosts.request(start.instance_id, "chat", messages=[], max_tokens=2)).status == 200
