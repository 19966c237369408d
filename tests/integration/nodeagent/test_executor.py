"""Shared instances under a real nodeagent, loader, zygote and executor."""

from __future__ import annotations

import asyncio
from pathlib import Path

import psutil
import pytest

from shared.contracts.node import InstanceState
from shared.contracts.phases import Phase
from shared.sizing import need_of
from tests.integration.nodeagent.harness import gone
from tests.integration.nodeagent.shared_engines import ASKED, shared_node, started
from tests.support.engines import Engines
from tests.support.servers import NatsServer

pytestmark = pytest.mark.slow


async def test_shared_instances_live_in_one_process_through_a_stop_and_an_adoption(nats_server: NatsServer, tmp_path: Path) -> None:
    async with shared_node(nats_server.url, tmp_path) as (node, cards):
        first = await started(node, cards[0], "shared1")
        second = await started(node, cards[1], "shared2")
        assert first.pids == second.pids
        assert Phase.CONTAINER in {s.phase for s in first.phases}, "it waited for the executor's start"
        assert Phase.ATTACH in {s.phase for s in second.phases}
        assert not {Phase.CONTAINER, Phase.LIBRARIES} & {s.phase for s in second.phases}
        await node.until(lambda s: all(i.suspension.assessed for i in s.instances))
        assert "attaches it again" in node.instance("shared1").suspension.reason

        node.kill_agent()
        await node.start_agent()
        for name in ("shared1", "shared2"):
            adopted = await node.reaches(name, InstanceState.READY)
            assert adopted.pids == first.pids

        await node.stop("shared1")
        stopped = await node.reaches("shared1", InstanceState.STOPPED, InstanceState.FAILED)
        assert (stopped.state, stopped.error) == (InstanceState.STOPPED, None)
        assert stopped.freed_bytes is not None
        assert psutil.pid_exists(first.pids[0])
        assert node.instance("shared2").state is InstanceState.READY
        again = await started(node, cards[0], "shared3")
        assert again.pids == first.pids
        both = await node.until(lambda s: sum(i.memory.reserved > 0 for i in s.instances) == 2)
        one = need_of(cards[0])
        assert both.devices[0].executor_bytes == one.executor
        assert both.devices[0].reserved_bytes == one.executor + 2 * one.total
    assert await gone(first.pids[0]), "the executor ends with its node"


@pytest.mark.usefixtures("kernel_kills")
async def test_killed_executor_fails_every_instance_in_it_and_the_next_start_gets_another(
    nats_server: NatsServer, tmp_path: Path
) -> None:
    async with shared_node(nats_server.url, tmp_path) as (node, cards):
        first, _ = [await started(node, card, f"shared{i}") for i, card in enumerate(cards)]
        psutil.Process(first.pids[0]).kill()
        for name in ("shared0", "shared1"):
            failed = await node.reaches(name, InstanceState.FAILED)
            assert failed.error is not None
            assert "signal 9" in failed.error.message
        await node.until(lambda s: s.devices[0].reserved_bytes == 0)
        again = await started(node, cards[0], "shared2")
        assert again.pids != first.pids


async def test_executor_that_does_not_answer_is_killed(nats_server: NatsServer, tmp_path: Path) -> None:
    async with shared_node(nats_server.url, tmp_path) as (node, cards):
        first = await started(node, cards[0], "shared1")
        psutil.Process(first.pids[0]).suspend()
        await node.stop("shared1", drain_timeout_ms=100)
        await node.reaches("shared1", InstanceState.STOPPED, within=60)
        assert await gone(first.pids[0])


async def test_stopped_instance_on_a_separate_device_returns_its_pages(nats_server: NatsServer, tmp_path: Path) -> None:
    async with shared_node(nats_server.url, tmp_path, THAW_DEVICES="cpu:0=512MiB/separate") as (node, cards):
        engines = Engines(node.mesh, node.name, nats_server.url, tmp_path)
        first = await started(node, cards[0], "shared1")
        await started(node, cards[1], "shared2")
        expected = (await engines.answer("shared1", "completion", **ASKED)).tokens()
        maps = Path(f"/proc/{first.pids[0]}/maps")

        async def until_lent(owners: int) -> None:
            """Wait until `owners` instances have the one page that a short request needs."""
            async with asyncio.timeout(60):
                while sum(" ---s " in line and "pages" in line for line in maps.read_text().splitlines()) != owners:  # noqa: ASYNC110  # there is no event
                    await asyncio.sleep(0.01)

        await until_lent(2)
        for turn in range(2):
            await node.stop(f"shared{2 * turn + 1}")
            stopped = await node.reaches(f"shared{2 * turn + 1}", InstanceState.STOPPED, InstanceState.FAILED)
            assert (stopped.state, stopped.error) == (InstanceState.STOPPED, None)
            await until_lent(1)
            name = f"shared{2 * turn + 3}"
            assert (await started(node, cards[0], name)).pids == first.pids
            assert (await engines.answer(name, "completion", **ASKED)).tokens() == expected
            await until_lent(2)
        log = (tmp_path / "nodeagent.log").read_text()
        assert "detached an instance" in log
        assert "failed to detach" not in log, "the first command has unmapped the weights"
