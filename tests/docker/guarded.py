"""A NATS server with the permissions of compose/nats.conf, on a port of its own."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import nats
from nats.aio.client import Client

from shared.nats_urls import inbox_prefix
from tests.docker.engine import ROOT
from tests.support.servers import kept_port, wait_for_port, wheel_script
from thaw.secrets import SERVICES, make_secrets, node_user

COMPOSE = ROOT / "compose"
NODES = ("node-0", "node-1")
_CONNECT_WITHIN_S = 60
"""Seconds that a side waits: on a busy machine the other one may not run for seconds."""


class Guarded:
    """A server with compose/nats.conf and clients of its users.

    Each client records the operations that the server refused.
    """

    def __init__(self, directory: Path, *, peers: bool = False) -> None:
        self._kept = [kept_port(), kept_port()]
        self.port, monitor = (int(kept.getsockname()[1]) for kept in self._kept)
        self._directory = directory
        self.add_nodes(*NODES, peers=peers)
        text = (COMPOSE / "nats.conf").read_text()
        for there, here in (
            ("0.0.0.0:4222", f"127.0.0.1:{self.port}"),
            ("127.0.0.1:8222", f"127.0.0.1:{monitor}"),
            ('"/data"', f'"{directory}/js"'),
            (
                'include "../../run/thaw-secrets/authorization.conf"',
                f'timeout: {_CONNECT_WITHIN_S}\ninclude "nats/authorization.conf"',
            ),
        ):
            assert there in text
            text = text.replace(there, here)
        (directory / "nats.conf").write_text(text)
        self.process = subprocess.Popen(
            [wheel_script("nats-server"), "-c", str(directory / "nats.conf")], stderr=subprocess.DEVNULL
        )
        wait_for_port(self.port, self.process)

    def add_nodes(self, *nodes: str, peers: bool = False) -> None:
        """Write credentials for exactly these nodes.

        A running server applies them after `reload`.
        """
        make_secrets(self._directory, {node: node for node in nodes}, peers=peers, nats=f"127.0.0.1:{self.port}")
        users = {service: service for service in SERVICES} | {node_user(node): node for node in nodes}
        self.urls = {user: (self._directory / folder / "thaw_nats_url").read_text() for user, folder in users.items()}

    def reload(self) -> None:
        self.process.send_signal(signal.SIGHUP)

    @contextlib.asynccontextmanager
    async def client(self, user: str) -> AsyncIterator[tuple[Client, asyncio.Queue[str]]]:
        refused: asyncio.Queue[str] = asyncio.Queue()

        async def on_error(error: Exception) -> None:
            refused.put_nowait(str(error).lower())

        url = self.urls[user]
        client = await nats.connect(url, inbox_prefix=inbox_prefix(url), error_cb=on_error, connect_timeout=_CONNECT_WITHIN_S)
        try:
            yield client, refused
        finally:
            await client.close()

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(60)
        for kept in self._kept:
            kept.close()
