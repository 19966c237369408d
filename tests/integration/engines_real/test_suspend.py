"""Real vLLM and llama.cpp: suspended, resumed and swapped, many times.

Their memory is proved free, and the tokens stay the same.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import pytest_asyncio

from services.nodeagent.suspend import memory
from shared.contracts.node import InstanceState
from tests.integration.engines_real.conftest import environment
from tests.integration.nodeagent.harness import MIB, Node, running_node
from tests.integration.suspend.hosted import descriptors, engine_pids, generate, pss, start_hosted
from tests.support.hosted import hosted_card
from tests.support.paging import skip_unless_able, skip_unless_swap
from tests.support.process_memory import held_bytes
from tests.support.servers import NatsServer

SUSPENDED, READY = InstanceState.SUSPENDED, InstanceState.READY
VLLM_MIB = 4000
SWAP_MIB = 2000
SWAPS = int(os.environ.get("THAW_TEST_SWAPS", "8"))
"""Suspensions in a row, without growth. `make test-long` sets 200."""
ROOM_FOR_A_CONNECTION = 2
# vLLM takes half a minute to start, and minutes on a busy machine.
pytestmark = [pytest.mark.timeout(600), pytest.mark.asyncio(loop_scope="module")]


@dataclass(frozen=True)
class Parked:
    """A node with room for one engine, on which a vLLM and a llama.cpp are suspended."""

    node: Node
    vllm: str
    llamacpp: str


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def parked(
    nats_server: NatsServer, model_directory: Path, gguf_file: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Parked]:
    """Start both engines; each test leaves them suspended.

    An engine that is parked starts without a request, is warmed and suspended; its first request
    only resumes it.
    """
    skip_unless_able()
    skip_unless_swap(SWAP_MIB)
    settings = {**environment("vllm", "llamacpp"), "THAW_DEVICES": f"cpu:0={VLLM_MIB}MiB", "THAW_ENGINE_THREADS": "1"}
    cards = hosted_card(model_directory, "vllm", context=1024), hosted_card(gguf_file, "llamacpp", context=1024)
    async with running_node(nats_server.url, tmp_path_factory.mktemp("node"), **settings) as node:
        # Each needs the whole device at first: vLLM is suspended before the other one starts.
        vllm = await start_hosted(node, cards[0], mib=VLLM_MIB - 200, park=True)
        llamacpp = await start_hosted(node, cards[1], mib=VLLM_MIB - 600, park=True)
        yield Parked(node, vllm.instance_id, llamacpp.instance_id)


async def test_parked_vllm_holds_little_memory_and_answers_when_resumed(parked: Parked) -> None:
    node, name = parked.node, parked.vllm
    status = node.instance(name)
    assert status.suspended is not None
    assert status.memory.reserved < 0.25 * VLLM_MIB * MIB
    await node.resume(name)
    await node.reaches(name, READY)
    assert await generate(node, name)
    await node.suspend(name)
    await node.reaches(name, SUSPENDED)


async def test_vllm_is_suspended_and_resumed_with_the_same_output(parked: Parked) -> None:
    node, name = parked.node, parked.vllm
    await node.resume(name)
    await node.reaches(name, READY)
    text, pids = await generate(node, name), engine_pids(node, name)
    used = memory.footprint(pids)
    assert len(pids) > 1, "the whole tree of its processes"
    await node.suspend(name)
    status = await node.reaches(name, SUSPENDED)
    after = pss(node, name)
    assert after <= 0.25 * (used.pss + used.swap), f"{after >> 20} of {(used.pss + used.swap) >> 20} MiB are still in use"
    assert abs(status.suspension.left_bytes - after) < 0.2 * after + 8 * MIB
    await node.resume(name)
    status = await node.reaches(name, READY)
    assert engine_pids(node, name) == pids, "the same processes"
    assert status.suspension.fell_back is None
    assert await generate(node, name) == text
    assert status.started is not None
    assert status.resumed is not None
    assert status.resumed.took_ms < status.started.took_ms / 10
    await node.suspend(name)
    await node.reaches(name, SUSPENDED)


@pytest.mark.parametrize("engine", ["vllm", "llamacpp"])
async def test_engine_is_suspended_many_times_without_growth(parked: Parked, engine: str) -> None:
    name = getattr(parked, engine)
    await parked.node.resume(name)
    await parked.node.reaches(name, READY)
    await swapped_without_growth(parked.node, name, SWAPS)
    await parked.node.suspend(name)
    await parked.node.reaches(name, SUSPENDED)


async def swapped_without_growth(node: Node, name: str, swaps: int) -> None:
    """Repeat suspension and resumption, without growth or changed output.

    Memory, descriptors and processes of engine, host and agent do not grow.
    """
    text, pids = await generate(node, name), node.instance(name).pids
    already = node.instance(name).suspension.resumes
    assert node.process is not None
    agent = node.process.pid
    sizes, open_files, agents = [], [], []
    for _ in range(swaps):
        await node.suspend(name)
        await node.reaches(name, SUSPENDED)
        await node.resume(name)
        await node.reaches(name, READY)
        sizes.append(held_bytes(node.instance(name).pids))
        open_files.append(descriptors((*node.instance(name).pids, agent)))
        agents.append(held_bytes((agent,)))
    assert node.instance(name).pids == pids
    assert set(psutil.Process(pids[0]).children(recursive=True)) <= {psutil.Process(p) for p in pids}
    assert await generate(node, name) == text
    early = slice(0, max(2, swaps // 4))
    # What leaked stays open. A health check's connections, which a sample may count, are closed.
    async with asyncio.timeout(60):
        while descriptors((*pids, agent)) > max(open_files[early]) + ROOM_FOR_A_CONNECTION:  # noqa: ASYNC110 - no event
            await asyncio.sleep(0.1)
    assert max(sizes[-3:]) <= 1.1 * max(sizes[early])
    assert max(agents[-3:]) <= 1.1 * max(agents[early]) + 4 * MIB
    suspension = node.instance(name).suspension
    assert (suspension.resumes, suspension.fell_back) == (swaps + already, None)


async def test_vllm_and_llamacpp_alternate_on_a_device_with_room_for_one(parked: Parked) -> None:
    node, names = parked.node, (parked.vllm, parked.llamacpp)
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
