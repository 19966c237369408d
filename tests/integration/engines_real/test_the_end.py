"""Real engines that die are detected, explained and restarted.

The file's name sorts last, since it kills the engine that the other files share.
"""

from __future__ import annotations

import signal
from pathlib import Path

import psutil
import pytest

from shared.contracts.node import InstanceState
from shared.messaging import Mesh
from tests.integration.engines_real.conftest import FAMILY, PATIENCE_S, RealEngine, listening
from tests.integration.nodeagent.harness import gone, running_node, start_command
from tests.support.hosted import hosted_card
from tests.support.real_engines import python_of
from tests.support.servers import NatsServer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2 * PATIENCE_S)]


async def test_vllm_with_a_killed_core_is_reported_as_failed(mesh: Mesh, nats_server: NatsServer, vllm: RealEngine) -> None:
    hosts = await listening(mesh, nats_server.url, vllm)
    hosted = hosts.reports[vllm.instance][-1].hosted
    assert hosted is not None
    assert len(hosted.pids) >= 3
    largest = max(hosted.pids, key=lambda p: psutil.Process(p).memory_info().rss)
    psutil.Process(largest).kill()
    failed = await hosts.reported(vllm.instance, lambda r: r.state == "failed")
    assert failed.error is not None
    await hosts.left_nothing(vllm.instance)


@pytest.mark.runs("llamacpp", FAMILY)
@pytest.mark.usefixtures("kernel_kills")
async def test_llamacpp_is_killed_and_started_again(nats_server: NatsServer, gguf_file: Path, tmp_path: Path) -> None:
    settings = {"THAW_DEVICES": "cpu:0=2GiB", "THAW_LLAMACPP_PYTHON": python_of("llamacpp")}
    card = hosted_card(gguf_file, "llamacpp", context=1024)
    async with running_node(nats_server.url, tmp_path, **settings) as node:
        await start_command(node, "llama1", card)
        status = await node.reaches("llama1", InstanceState.READY, InstanceState.FAILED, within=PATIENCE_S)
        assert status.error is None
        host = status.pids[0]
        (engine,) = (pid for pid in status.pids if "llama_cpp.server" in psutil.Process(pid).cmdline())
        assert (await node.until(lambda s: s.instances[0].memory.private > 60 << 20)).instances[0].state is InstanceState.READY
        # A restarted agent finds it serving.
        node.kill_agent()
        await node.start_agent()
        assert node.instance("llama1").state is InstanceState.READY
        psutil.Process(engine).send_signal(signal.SIGKILL)
        failed = await node.reaches("llama1", InstanceState.FAILED)
        assert failed.error is not None
        assert "killed by signal 9" in failed.error.message
        await node.until(lambda s: s.devices[0].reserved_bytes == 0)
        assert await gone(host)
        await start_command(node, "llama2", card, token=3)
        assert (await node.reaches("llama2", InstanceState.READY, InstanceState.FAILED, within=PATIENCE_S)).error is None
        await node.stop("llama2", token=(1 << 32) + 4)
        stopped = await node.reaches("llama2", InstanceState.STOPPED, InstanceState.FAILED)
        assert stopped.error is None
        assert stopped.freed_bytes
        assert stopped.freed_bytes > 60 << 20
