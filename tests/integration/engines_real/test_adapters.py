"""LoRA adapters in a real vLLM: the tokens of the merged model, in batches with the base's."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from shared.contracts import subjects
from shared.contracts.base import Done, Message
from shared.contracts.engine import DropAdapter
from shared.contracts.loader import FetchModelFiles, ModelFilesFetched
from shared.messaging import Mesh
from tests.integration.engines_real.conftest import PATIENCE_S, RealEngine, listening
from tests.integration.engines_real.merged_lora import PROMPT, TOKENS, merged
from tests.support.adapters import adapter_card, write_adapter
from tests.support.hosted import Hosts
from tests.support.servers import NatsServer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2 * PATIENCE_S)]
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@pytest.fixture(scope="module")
def adapters(model_directory: Path) -> list[Path]:
    places = [model_directory.parent / f"lora{i}" for i in range(3)]
    return [write_adapter(p, model_directory, targets=TARGETS, rank=4 + 4 * i, seed=i) for i, p in enumerate(places)]


@pytest.fixture
async def hosts(mesh: Mesh, nats_server: NatsServer, vllm: RealEngine) -> Hosts:
    async def fetch(request: FetchModelFiles) -> Message:
        return ModelFilesFetched(directory=request.card.info.source)

    await mesh.respond(subjects.loader_command(vllm.node), TypeAdapter(FetchModelFiles), fetch).start()
    return await listening(mesh, nats_server.url, vllm)


async def generated(hosts: Hosts, instance: str, adapter: Path | None) -> list[int]:
    asked: dict[str, Any] = {"prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    if adapter is not None:
        asked["adapter"] = adapter_card(adapter, adapter.name)
    answer = await hosts.request(instance, "completion", return_token_ids=True, **asked)
    assert answer.status == 200, answer.error or answer.body
    assert answer.json["model"] == ("demo" if adapter is None else adapter.name)
    found: list[int] = answer.json["choices"][0]["token_ids"]
    return found


async def test_adapters_and_base_give_the_tokens_of_merged_models(
    hosts: Hosts, vllm: RealEngine, model_directory: Path, adapters: list[Path]
) -> None:
    """More adapters than vLLM has slots, asked for at once and in turn."""
    cases: list[Path | None] = [None, *adapters]
    expected = [merged(model_directory, case) for case in cases]
    assert len({tuple(tokens) for tokens in expected}) == len(cases)
    assert await asyncio.gather(*(generated(hosts, vllm.instance, case) for case in cases)) == expected
    for case, tokens in reversed(list(zip(cases, expected, strict=True))):
        assert await generated(hosts, vllm.instance, case) == tokens


async def test_adapter_of_the_same_name_with_other_weights_reuses_no_prefix(
    hosts: Hosts, vllm: RealEngine, mesh: Mesh, model_directory: Path, tmp_path: Path
) -> None:
    for seed in (10, 11):
        place = write_adapter(tmp_path / "again", model_directory, targets=TARGETS, seed=seed)
        assert await generated(hosts, vllm.instance, place) == merged(model_directory, place)
    await mesh.request(subjects.engine_control(vllm.instance), DropAdapter(name="again"), Done)
    await hosts.reported(vllm.instance, lambda r: all(a.name != "again" for a in r.load.adapters))
