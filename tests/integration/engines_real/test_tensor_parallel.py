"""A real vLLM of two ranks, on two devices, with weights from the node's loader.

Pipeline ranks are not tried: vLLM 0.32's runner for cpu fails at their first request.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shared.messaging import Mesh
from tests.integration.engines_real.conftest import PATIENCE_S, PluginEngine, plugin_card, spawned_with_loader
from tests.integration.engines_real.test_adapters import PROMPT, TOKENS, merged
from tests.support.hosted import Hosts
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
