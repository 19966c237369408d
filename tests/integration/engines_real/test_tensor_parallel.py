"""A real vLLM of two ranks: on two devices of one node, with weights from its loader; on two nodes.

Pipeline ranks are not tried: vLLM 0.32's runner for cpu fails at their first request.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shared.contracts.stages import Stage, split_layers
from shared.messaging import Mesh
from tests.integration.engines_real.conftest import PATIENCE_S, PluginEngine, plugin_card, spawned_with_loader
from tests.integration.engines_real.test_adapters import PROMPT, TOKENS, merged
from tests.support.hosted import Hosts, hosted_card
from tests.support.real_engines import python_of
from tests.support.servers import NatsServer
from thaw.demo.models import SIZES, make_demo_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2 * PATIENCE_S)]


@pytest.fixture
def even_model(tmp_path: Path) -> Path:
    """Create a model with an even number of heads of each kind."""
    return make_demo_model(tmp_path / "even", replace(SIZES["5m"], hidden=256, heads=8, kv_heads=4))


@pytest.fixture
def two_ranks(nats_server: NatsServer, even_model: Path, tmp_path: Path) -> Iterator[PluginEngine]:
    yield from spawned_with_loader(plugin_card(even_model, tensor_parallel_size=2), nats_server.url, tmp_path)


@pytest.mark.runs("vllm", "llama")
async def test_each_rank_takes_its_share_from_the_loader(
    mesh: Mesh, nats_server: NatsServer, two_ranks: PluginEngine, even_model: Path, tmp_path: Path
) -> None:
    hosts = Hosts(mesh, two_ranks.start.node, nats_server.url, tmp_path)
    hosts.patience_s = PATIENCE_S
    await hosts.start()
    report = await hosts.settled(two_ranks.start.instance_id)
    assert report.state == "ready", report.error
    asked: dict[str, Any] = {"prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    answer = await hosts.whole(two_ranks.start.instance_id, "completion", return_token_ids=True, **asked)
    assert answer.json["choices"][0]["token_ids"] == merged(even_model, None)
    log = Path(two_ranks.start.log_path).read_text()
    assert log.count("from its loader") == 2, "each rank has read from it"


@pytest.mark.runs("vllm", "llama")
async def test_ranks_on_two_nodes_are_one_engine(mesh: Mesh, nats_server: NatsServer, even_model: Path, tmp_path: Path) -> None:
    """Both hosts are on this machine. When one rank is killed, the other one ends too."""
    card = hosted_card(
        even_model, "vllm", context=1024, dtype="float32", stages=2, engine_args={"tensor_parallel_size": 2}, name="even"
    )
    nodes = [Hosts(mesh, f"real-rank-{i}", nats_server.url, tmp_path) for i in range(2)]
    starts: list[str] = []
    for index, hosts in enumerate(nodes):
        hosts.patience_s = PATIENCE_S
        await hosts.start()
        stage = Stage(
            group_id="g",
            index=index,
            count=2,
            layers=split_layers(4, 2)[index],
            secret="s" * 32,
            first=starts[0] if index else None,
        )
        start = hosts.spec(card).model_copy(update={"stage": stage})
        start = start.model_copy(update={"environment": {**start.environment, "THAW_VLLM_PYTHON": python_of("vllm")}})
        hosts.spawn(start, "services.enginehost")
        starts.append(start.instance_id)
    try:
        reports = [await hosts.settled(instance) for hosts, instance in zip(nodes, starts, strict=True)]
        assert [r.state for r in reports] == ["ready", "ready"], [r.error for r in reports]
        asked: dict[str, Any] = {"prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
        answer = await nodes[0].whole(starts[0], "completion", return_token_ids=True, **asked)
        assert answer.json["choices"][0]["token_ids"] == merged(even_model, None)
        assert reports[1].hosted is not None
        os.kill(reports[1].hosted.pids[0], signal.SIGKILL)
        for hosts, instance in zip(nodes, starts, strict=True):
            failed = await hosts.reported(instance, lambda r: r.state == "failed")
            assert failed.error is not None
            await hosts.left_nothing(instance)
    finally:
        for hosts in nodes:
            hosts.close()
