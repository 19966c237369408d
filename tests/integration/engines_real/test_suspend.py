"""Real vLLM and llama.cpp: suspended, resumed and swapped, many times.

Their memory is proved free, and the tokens stay the same.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from services.nodeagent.suspend import memory
from shared.contracts.models import ModelCard
from shared.contracts.node import InstanceState
from tests.integration.engines_real.conftest import environment
from tests.integration.nodeagent.harness import MIB, Node, running_node
from tests.integration.suspend.hosted import descriptors, engine_pids, generate, pss, start_hosted
from tests.support.hosted import hosted_card
from tests.support.paging import skip_unless_able, skip_unless_swap
from tests.support.servers import NatsServer

SUSPENDED, READY = InstanceState.SUSPENDED, InstanceState.READY
VLLM_MIB = 4000
SWAP_MIB = 2000
SWAPS = int(os.environ.get("THAW_TEST_SWAPS", "12"))
"""Suspensions in a row, without growth. `make test-long` sets 200."""
ROOM_FOR_A_CONNECTION = 2
# vLLM takes half a minute to start, and minutes on a busy machine.
pytestmark = pytest.mark.timeout(600)


@pytest.fixture
def able() -> None:
    skip_unless_able()


@pytest.fixture
def vllm_card(model_directory: Path) -> ModelCard:
    return hosted_card(model_directory, "vllm", context=1024)


@pytest.fixture
async def vllm_node(able: None, nats_server: NatsServer, tmp_path: Path) -> AsyncIterator[Node]:
    skip_unless_swap(SWAP_MIB)
    settings = {**environment("vllm"), "THAW_DEVICES": f"cpu:0={VLLM_MIB}MiB"}
    async with running_node(nats_server.url, tmp_path, **settings) as found:
        yield found


async def test_vllm_is_suspended_and_resumed_with_the_same_output(vllm_node: Node, vllm_card: ModelCard) -> None:
    node = vllm_node
    status = await start_hosted(node, vllm_card, mib=VLLM_MIB)
    name = status.instance_id
    before, text, pids = pss(node, name), await generate(node, name), engine_pids(node, name)
    assert len(pids) > 1, "the whole tree of its processes"
    await node.suspend(name)
    status = await node.reaches(name, SUSPENDED)
    after = pss(node, name)
    assert after <= 0.25 * before, f"{after >> 20} of {before >> 20} MiB are still in use"
    assert abs(status.suspension.left_bytes - after) < 0.2 * after + 8 * MIB
    await node.resume(name)
    status = await node.reaches(name, READY)
    assert engine_pids(node, name) == pids, "the same processes"
    assert status.suspension.fell_back is None
    assert await generate(node, name) == text
    assert status.started is not None
    assert status.resumed is not None
    assert status.resumed.took_ms < status.started.took_ms / 10


@pytest.fixture
async def llamacpp_node(able: None, nats_server: NatsServer, tmp_path: Path) -> AsyncIterator[Node]:
    settings = {**environment("llamacpp"), "THAW_DEVICES": "cpu:0=900MiB"}
    async with running_node(nats_server.url, tmp_path, **settings) as found:
        yield found


async def test_llamacpp_is_suspended_many_times_without_growth(llamacpp_node: Node, gguf_file: Path) -> None:
    name = (await start_hosted(llamacpp_node, hosted_card(gguf_file, "llamacpp", context=1024), mib=600)).instance_id
    await swapped_without_growth(llamacpp_node, name, SWAPS)


async def test_parked_vllm_is_suspended_many_times_without_growth(vllm_node: Node, vllm_card: ModelCard) -> None:
    """vLLM is parked at its start, and then suspended many times.

    Without a request it is started, warmed and suspended; its first request only resumes it.
    """
    status = await start_hosted(vllm_node, vllm_card, mib=VLLM_MIB, park=True)
    assert status.suspended is not None
    assert status.memory.reserved < 0.25 * VLLM_MIB * MIB
    await vllm_node.resume(status.instance_id)
    await vllm_node.reaches(status.instance_id, READY)
    await swapped_without_growth(vllm_node, status.instance_id, SWAPS, already=1)


async def swapped_without_growth(node: Node, name: str, swaps: int, already: int = 0) -> None:
    """Repeat suspension and resumption, without growth or changed output.

    Memory, descriptors and processes of engine, host and agent do not grow.
    """
    text, pids = await generate(node, name), node.instance(name).pids
    assert node.process is not None
    agent = node.process.pid
    sizes, open_files, agents = [], [], []
    for _ in range(swaps):
        await node.suspend(name)
        await node.reaches(name, SUSPENDED)
        await node.resume(name)
        await node.reaches(name, READY)
        held = memory.footprint(node.instance(name).pids)
        sizes.append(held.pss + held.swap)
        open_files.append(descriptors((*node.instance(name).pids, agent)))
        agents.append(memory.footprint((agent,)).pss)
    assert node.instance(name).pids == pids
    assert set(psutil.Process(pids[0]).children(recursive=True)) <= {psutil.Process(p) for p in pids}
    assert await generate(node, name) == text
    early, late = slice(0, max(2, swaps // 4)), slice(swaps // 2, None)
    assert max(open_files[late]) <= max(open_files[early]) + ROOM_FOR_A_CONNECTION
    assert max(sizes[-3:]) <= 1.1 * max(sizes[early])
    assert max(agents[-3:]) <= 1.1 * max(agents[early]) + 4 * MIB
    suspension = node.instance(name).suspension
    assert (suspension.resumes, suspension.fell_back) == (swaps + already, None)


async def test_vllm_and_llamacpp_alternate_on_a_device_with_room_for_one(
    able: None, nats_server: NatsServer, tmp_path: Path, vllm_card: ModelCard, gguf_file: Path
) -> None:
    skip_unless_swap(SWAP_MIB)
    settings = {**environment("vllm", "llamacpp"), "THAW_DEVICES": f"cpu:0={VLLM_MIB}MiB"}
    async with running_node(nats_server.url, tmp_path, **settings) as node:
        names: list[str] = []
        for card in (vllm_card, hosted_card(gguf_file, "llamacpp", context=1024)):
            # Each needs the whole device at first: it is parked before the other one starts.
            names.append((await start_hosted(node, card, mib=VLLM_MIB - 400 * len(names) - 200, park=True)).instance_id)
        texts: dict[str, str] = {}
        for turn in range(6):
            here, there = names[turn % 2], names[1 - turn % 2]
            await node.resume(here)
            await node.reaches(here, READY)
            assert node.instance(there).state is SUSPENDED
            assert await generate(node, here) == texts.setdefault(here, await generate(node, here))
            await node.suspend(here)
            await node.reaches(here, SUSPENDED)
        assert all(node.instance(n).suspension.fell_back is None for n in names)
