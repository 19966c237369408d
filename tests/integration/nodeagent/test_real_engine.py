"""The real zygote, engine and loader under a real nodeagent."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from shared.contracts import subjects
from shared.contracts.base import Done
from shared.contracts.models import ModelSpec
from shared.contracts.node import InstanceState
from shared.contracts.phases import Phase
from tests.integration.nodeagent.harness import gone, running_node
from tests.integration.nodeagent.real_engines import inspected, start_of
from tests.support.forking import executed
from tests.support.servers import NatsServer
from thaw.demo.models import make_demo_model

pytestmark = pytest.mark.slow


@pytest.fixture
def started_as_by_users() -> Iterator[None]:
    """Execute the nodeagent, its zygote and its engines; other tests fork them."""
    with executed():
        yield


@pytest.mark.usefixtures("started_as_by_users")
@pytest.mark.parametrize("zygote", ["true", "false"])
async def test_a_real_engine_from_start_to_proved_free(nats_server: NatsServer, tmp_path: Path, zygote: str) -> None:
    source = make_demo_model(tmp_path / "model", "test")
    settings = {
        "THAW_ZYGOTE": zygote,
        "THAW_ENGINE_MODULE": "services.engine",
        "THAW_ENGINE_THREADS": "1",
        "THAW_DEVICES": "cpu:0=2GiB",
    }
    async with running_node(nats_server.url, tmp_path, **settings) as node:
        await node.loader_off()
        loader = node.spawn_loader()
        try:
            card = await inspected(node, ModelSpec(name="tiny", source=str(source)))
            await node.mesh.request(subjects.node_command(node.name), start_of(card, "real1"), Done)
            status = await node.reaches("real1", InstanceState.READY, InstanceState.FAILED, within=90)
            assert status.error is None
            assert {Phase.RESERVE, Phase.CONTAINER, Phase.LOAD, Phase.INIT} <= {s.phase for s in status.phases}
            measured = (await node.until(lambda s: s.instances[0].memory.private > 0)).instances[0].memory
            assert (await node.until(lambda s: s.instances[0].memory.weights > 0)).instances[0].memory.weights > 0
            # A restarted agent finds the real engine too.
            node.kill_agent()
            await node.start_agent()
            assert node.instance("real1").pids == status.pids
            assert node.instance("real1").state is InstanceState.READY
            await node.stop("real1")
            stopped = await node.reaches("real1", InstanceState.STOPPED, InstanceState.FAILED)
            assert stopped.error is None
            assert stopped.freed_bytes is not None
            assert stopped.freed_bytes >= card.info.weights_bytes
            assert measured.private > 0
            assert await gone(status.pids[0])
            assert await asyncio.to_thread(node.stop_agent) == 0
        finally:
            loader.terminate()
            assert await gone(loader.pid)
            loader.wait()


@pytest.mark.usefixtures("kernel_kills")
async def test_killed_engine_is_reported_with_its_signal(nats_server: NatsServer, tmp_path: Path) -> None:
    source = make_demo_model(tmp_path / "model", "test")
    settings = {"THAW_ZYGOTE": "true", "THAW_ZYGOTE_MODULE": "services.engine.zygote", "THAW_ENGINE_THREADS": "1"}
    async with running_node(nats_server.url, tmp_path, **settings) as node:
        await node.loader_off()
        loader = node.spawn_loader()
        try:
            card = await inspected(node, ModelSpec(name="tiny", source=str(source)))
            await node.mesh.request(subjects.node_command(node.name), start_of(card, "real2"), Done)
            status = await node.reaches("real2", InstanceState.READY, InstanceState.FAILED, within=90)
            assert status.error is None
            psutil.Process(status.pids[0]).kill()
            failed = await node.reaches("real2", InstanceState.FAILED)
            assert failed.error is not None
            assert "signal 9" in failed.error.message
            await node.until(lambda s: s.devices[0].reserved_bytes == 0)
            assert await asyncio.to_thread(node.stop_agent) == 0
        finally:
            loader.terminate()
            assert await gone(loader.pid)
            loader.wait()
