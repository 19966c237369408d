"""Acknowledged writes survive the loss of all unsynced data.

A power cut cannot be caused here. These tests take its two halves: the server that `thaw up`
configures syncs every write before it acknowledges it, and a copy of its files made at the
acknowledgement holds the write.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import nats
import pytest
from nats.js.api import PersistMode

from shared.contracts import subjects
from shared.messaging.streams import ensure_trace_stream, idempotency_bucket, keys_bucket
from shared.ports import free_port
from tests.support.servers import wait_for_port
from thaw.launcher.home import Home
from thaw.launcher.plan import Credentials, MeshPlan
from thaw.launcher.servers import nats_program, write_nats_config

ROOT = Path(__file__).parents[3]


class OwnNats:
    """nats-server as `thaw up` configures it, with its monitoring port."""

    def __init__(self, home: Home) -> None:
        home.create()
        self.home, self.monitor = home, free_port()
        secrets = Credentials(nats_password="n", database_password="d", admin_key="k")
        self.plan = MeshPlan(credentials=secrets, nats_port=free_port(), postgres_port=free_port())
        config = write_nats_config(home, self.plan)
        self.process = subprocess.Popen(
            [nats_program(), "-c", str(config), "-a", "127.0.0.1", "-m", str(self.monitor)], stderr=subprocess.DEVNULL
        )
        wait_for_port(self.plan.nats_port, self.process)
        wait_for_port(self.monitor, self.process)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def server() -> Iterator[OwnNats]:
    with tempfile.TemporaryDirectory(prefix="thaw-") as directory:  # tmp_path is too long for the sockets in a home
        server = OwnNats(Home(Path(directory) / "home"))
        yield server
        server.kill()


def test_every_write_is_synced_before_its_acknowledgement(server: OwnNats) -> None:
    status: dict[str, Any] = httpx.get(f"http://127.0.0.1:{server.monitor}/varz", timeout=20).json()
    assert status["jetstream"]["config"]["sync_always"] is True
    settings = [line for line in (ROOT / "compose" / "nats.conf").read_text().splitlines() if line.startswith("jetstream {")]
    assert ["sync_interval: always" in line for line in settings] == [True]


async def test_disk_copy_at_acknowledgement_has_key_revocation_and_response(server: OwnNats) -> None:
    client = await nats.connect(server.plan.effective_nats_url)
    js = client.jetstream(timeout=20)
    keys, answers = await keys_bucket(js), await idempotency_bucket(js, 3600)
    await ensure_trace_stream(js)
    traces = (await js.stream_info(subjects.TRACE_STREAM)).config
    assert traces.persist_mode == PersistMode.ASYNC, "every request would wait for the disk"
    await keys.put("a" * 64, b"kept")
    await keys.put("b" * 64, b"revoked")
    await answers.put("c" * 64, b"done")
    await keys.delete("b" * 64)
    copy = Home(server.home.root.parent / "copy")
    shutil.copytree(server.home.root, copy.root)
    server.kill()
    await client.close()
    restored = OwnNats(copy)
    try:
        client = await nats.connect(restored.plan.effective_nats_url)
        js = client.jetstream(timeout=20)
        keys, answers = await keys_bucket(js), await idempotency_bucket(js, 3600)
        assert await keys.keys() == ["a" * 64]
        assert (await answers.get("c" * 64)).value == b"done"
        await client.close()
    finally:
        restored.kill()
