"""Real vLLM and llama.cpp: suspended with their memory proved free, resumed with the same tokens, many times, and against each other."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from services.nodeagent.suspend import memory
from shared.contracts.models import ModelCard
from shared.contracts.node import InstanceState
from tests.integration.nodeagent.harness import MIB, Node, running_node
from tests.integration.suspend.hosted import demo_model, descriptors, engine_pids, environment, generate, pss, start_hosted
from tests.support.hosted import hosted_card
from tests.support.servers import NatsServer

SUSPENDED, READY, STOPPED = InstanceState.SUSPENDED, InstanceState.READY, InstanceState.STOPPED
VLLM_MIB = 4000


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return demo_model(tmp_path_factory.mktemp("suspended"))


@pytest.fixture
def vllm_card(model: Path) -> ModelCard:
    return hosted_card(model, "vllm", context=1024)


@pytest.fixture
async def vllm_node(able: None, nats_server: NatsServer, tmp_path: Path) -> AsyncIterator[Node]:
    if memory.swap_space().free < VLLM_MIB * MIB:
        pytest.skip(f"real vLLM needs {VLLM_MIB} MiB of free swap to be suspended")
    settings = {**environment("vllm"), "THAW_DEVICES": f"cpu:0={VLLM_MIB}MiB"}
    async with running_node(nats_server.url, tmp_path, **settings) as found:
        yield found


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

    # Many times in a row, without growth.
    sizes, open_files = [], []
    for _ in range(50):
        await node.suspend(name)
        await node.reaches(name, SUSPENDED)
        await node.resume(name)
        await node.reaches(name, READY)
        sizes.append(sum(memory.footprint(engine_pids(node, name)).__dict__.values()))
        open_files.append(descriptors(engine_pids(node, name)))
    assert engine_pids(node, name) == pids
    assert await generate(node, name) == text
    assert max(open_files[25:]) <= max(open_files[:5])
    assert max(sizes[-5:]) <= 1.1 * max(sizes[:5])
