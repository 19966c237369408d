"""A loader process for each test, on real NATS."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from nats.aio.msg import Msg

from shared.contracts import subjects
from shared.contracts.base import Done, Message
from shared.contracts.loader import (
    AttachWeights,
    Inspected,
    InspectModel,
    LoaderStatus,
    PrepareWeights,
    ReleaseWeights,
    WeightsAttached,
    WeightsReleased,
)
from shared.contracts.models import ModelCard, ModelSpec
from shared.contracts.segment import segment_prefix
from shared.errors import Unreachable
from shared.messaging import Mesh
from tests.support.patient_mesh import mesh
from tests.support.servers import NatsServer

__all__ = ["mesh"]

SHM = Path("/dev/shm")


class LoaderProcess:
    """`python -m services.loader` for a node of its own."""

    module = "services.loader"

    def __init__(self, url: str, home: Path, node: str) -> None:
        self.node, self.home = node, home
        self.prefix = segment_prefix(home, node)
        self.environment = {
            "THAW_NATS_URL": url,
            "THAW_HOME": str(home),
            "THAW_NODE": node,
            "THAW_LOG_FORMAT": "text",
            "THAW_PRETOUCH": "off",
            "THAW_DRAM_BYTES": "0",  # released weights are evicted; test modules of the DRAM cache have a budget
        }
        self.log = home / "loader.log"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", self.module], env={**os.environ, **self.environment}, stdout=log, stderr=log
            )

    def end(self, signum: int = signal.SIGTERM) -> int:
        assert self.process is not None
        if self.process.poll() is None:
            self.process.send_signal(signum)
        return self.process.wait(60)

    def segments(self) -> list[str]:
        return sorted(p.name for p in SHM.iterdir() if p.name.startswith(self.prefix))

    def memory(self) -> int:
        """Return the bytes of shared memory in the node's files."""
        return sum((SHM / name).stat().st_blocks * 512 for name in self.segments())

    def close(self) -> None:
        if self.process is not None:
            self.end(signal.SIGKILL)
        for name in self.segments():
            (SHM / name).unlink()


class Client:
    """The loader's client, as schedulers, engines and nodeagents use it."""

    def __init__(self, mesh: Mesh, node: str) -> None:
        self.mesh, self._node, self._subject = mesh, node, subjects.loader_command(node)

    async def until_served(self, by: LoaderProcess | None = None, within: float = 60.0) -> None:
        """Wait until the loader answers.

        Args:
            by: A loader that was started after another was killed. NATS may still deliver to the
                killed one, which never answers: nothing is asked before the new one's first status.
        """
        received = asyncio.Event()

        async def hear(message: Msg) -> None:
            pid = LoaderStatus.model_validate_json(message.data).pid
            if by is None or (by.process is not None and by.process.pid == pid):
                received.set()

        subscription = await self.mesh.nc.subscribe(subjects.loader_status(self._node), cb=hear)
        try:
            async with asyncio.timeout(within):
                if by is not None:
                    await received.wait()
                while True:
                    try:
                        await self.release("nobody")
                        return
                    except Unreachable:  # its first status arrives when it subscribes
                        received.clear()
                        await received.wait()
        finally:
            await subscription.unsubscribe()

    async def card(self, source: Path | str, name: str = "m", *, trust_remote_code: bool = False) -> ModelCard:
        spec = ModelSpec(name=name, source=str(source), trust_remote_code=trust_remote_code)
        found = await self.mesh.request(self._subject, InspectModel(spec=spec, deadline_ms=60_000), Inspected)
        return ModelCard(spec=spec, info=found.info, created=0)

    async def prepare(self, instance: str, card: ModelCard, token: int = 1) -> Message:
        return await self.mesh.request(self._subject, PrepareWeights(token=token, instance_id=instance, card=card), Done)

    async def attach(self, instance: str, card: ModelCard, until: str = "complete", deadline_ms: int = 60_000) -> WeightsAttached:
        ask = AttachWeights.model_validate({"instance_id": instance, "card": card, "until": until, "deadline_ms": deadline_ms})
        return await self.mesh.request(self._subject, ask, WeightsAttached)

    async def release(self, instance: str) -> int:
        ask = ReleaseWeights(instance_id=instance, deadline_ms=60_000)
        return (await self.mesh.request(self._subject, ask, WeightsReleased)).freed_bytes


@pytest.fixture
def loader_environment() -> dict[str, str]:
    """Settings of the loader. Test modules override it with theirs."""
    return {}


@pytest.fixture
def loader_module() -> str:
    """The module that runs as the loader. Tests override it by a parameter."""
    return LoaderProcess.module


@pytest.fixture
def loader(
    nats_server: NatsServer, tmp_path: Path, loader_environment: dict[str, str], loader_module: str
) -> Iterator[LoaderProcess]:
    process = LoaderProcess(nats_server.url, tmp_path / "home", f"n-{tmp_path.name.replace('_', '-').lower()}"[:60].rstrip("-"))
    process.module = loader_module
    process.environment |= loader_environment
    process.home.mkdir()
    process.start()
    yield process
    process.close()


@pytest.fixture
async def client(loader: LoaderProcess, mesh: Mesh) -> Client:
    client = Client(mesh, loader.node)
    await client.until_served()
    return client
