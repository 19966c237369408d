"""Real vLLM and llama.cpp: suspended with their memory proved free, resumed with the same tokens, many times, and against each other."""

from __future__ import annotations

import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from services.nodeagent.suspend import memory
from shared.contracts.models import ModelCard
from shared.contracts.node import InstanceState
from tests.integration.engines_real.conftest import MAKE_GGUF
from tests.integration.nodeagent.harness import MIB, Node, running_node
from tests.integration.suspend.hosted import demo_model, descriptors, engine_pids, environment, generate, pss, start_hosted
from tests.support.hosted import hosted_card
from tests.support.real_engines import python_of
from tests.support.servers import NatsServer

SUSPENDED, READY = InstanceState.SUSPENDED, InstanceState.READY
VLLM_MIB = 4000
SWAP_MIB = 2000
# vLLM takes half a minute to start, and minutes where others compute too.
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return demo_model(tmp_path_factory.mktemp("suspended"))


@pytest.fixture
def vllm_card(model: Path) -> ModelCard:
    return hosted_card(model, "vllm", context=1024)


@pytest.fixture
async def vllm_node(able: None, nats_server: NatsServer, tmp_path: Path) -> AsyncIterator[Node]:
    if memory.swap_space().free < SWAP_MIB * MIB:
        pytest.skip(f"real vLLM needs {SWAP_MIB} MiB of free swap to be suspended")
    settings = {**environment("vllm"), "THAW_DEVICES": f"cpu:0={VLLM_MIB}MiB"}
    async with running_node(nats_server.url, tmp_path, **settings) as found:
        yield found


@pytest.fixture(scope="module")
def gguf(model: Path) -> Path:
    out = model.parent / "5m.gguf"
    subprocess.run([python_of("llamacpp"), str(MAKE_GGUF), str(model), str(out)], check=True)
    return out


async def test_vllm_is_suspended_and_resumed_as_it_was(vllm_node: Node, vllm_card: ModelCard) -> None:
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


async def test_fifty_swaps_leave_no_growth(llamacpp_node: Node, gguf: Path) -> None:
    """In memory, descriptors or processes, and not in what it answers."""
    node = llamacpp_node
    name = (await start_hosted(node, hosted_card(gguf, "llamacpp", context=1024), mib=600)).instance_id
    text, pids = await generate(node, name), engine_pids(node, name)
    sizes, open_files = [], []
    for _ in range(50):
        await node.suspend(name)
        await node.reaches(name, SUSPENDED)
        await node.resume(name)
        await node.reaches(name, READY)
        held = memory.footprint(engine_pids(node, name))
        sizes.append(held.pss + held.swap)
        open_files.append(descriptors(engine_pids(node, name)))
    assert engine_pids(node, name) == pids
    assert await generate(node, name) == text
    assert max(open_files[25:]) <= max(open_files[:5])
    assert max(sizes[-5:]) <= 1.1 * max(sizes[:5])
    assert node.instance(name).suspension.resumes == 50


async def test_vllm_and_llamacpp_take_turns_on_a_device_that_holds_one(
    able: None, nats_server: NatsServer, tmp_path: Path, vllm_card: ModelCard, gguf: Path
) -> None:
    if memory.swap_space().free < SWAP_MIB * MIB:
        pytest.skip(f"real vLLM needs {SWAP_MIB} MiB of free swap to be suspended")
    settings = {**environment("vllm", "llamacpp"), "THAW_DEVICES": f"cpu:0={VLLM_MIB}MiB"}
    async with running_node(nats_server.url, tmp_path, **settings) as node:
        names: list[str] = []
        for card in (vllm_card, hosted_card(gguf, "llamacpp", context=1024)):
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
