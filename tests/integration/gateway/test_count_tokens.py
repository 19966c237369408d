"""Anthropic's token counting with the real `anthropic` client; no engine runs."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import anthropic
import httpx
import pytest
from tokenizers import Tokenizer

from shared.contracts import subjects
from shared.contracts.models import ModelCard
from shared.messaging.streams import catalog_bucket
from tests.integration.gateway.api_keys import add_key
from tests.integration.gateway.clients import anthropic_client
from tests.integration.gateway.conftest import CARDS, Served, until_listed
from tests.support.fake_engine import FakeNode, Run, card_of
from thaw.demo.tokenizer import write_tokenizer

ROUTE = "/v1/messages/count_tokens"
HELLO: list[Any] = [{"role": "user", "content": "Hi"}]
TOOL: dict[str, Any] = {"name": "f", "description": "Weather", "input_schema": {"type": "object", "properties": {}}}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    write_tokenizer(tmp_path, 2048, 2048)
    return tmp_path


def read_by_gateway(model: Path, engine: str = "llamacpp") -> ModelCard:
    card = card_of("counted", engine=engine)
    return card.model_copy(update={"info": card.info.model_copy(update={"source": str(model)})})


async def register(gateway: Served, node: FakeNode, card: ModelCard) -> None:
    bucket = await catalog_bucket(node.mesh.nc.jetstream())
    await bucket.put(subjects.token(card.name), card.model_dump_json().encode())
    await until_listed(gateway, (*CARDS, card))


@pytest.mark.parametrize("engine", ["builtin", "llamacpp"])
async def test_tokens_are_those_of_the_rendered_conversation(gateway: Served, node: FakeNode, model: Path, engine: str) -> None:
    await register(gateway, node, read_by_gateway(model, engine))
    async with anthropic_client(gateway) as client:
        plain = await client.messages.count_tokens(model="counted", system="Be brief", messages=HELLO)
        with_tool = await client.messages.count_tokens(model="counted", system="Be brief", messages=HELLO, tools=[TOOL])
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    text = "<|im_start|>system\nBe brief<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert plain.input_tokens == len(tokenizer.encode(text, add_special_tokens=False))
    assert with_tool.input_tokens > plain.input_tokens + 10


async def test_engine_with_the_route_counts_itself(gateway: Served, node: FakeNode) -> None:
    await register(gateway, node, card_of("counts", routes=(ROUTE,)))

    async def count(run: Run) -> None:
        await run.respond("application/json", json.dumps({"input_tokens": 42}).encode())
        await run.close()

    engine = await node.engine("counts", count)
    async with anthropic_client(gateway) as client:
        assert (await client.messages.count_tokens(model="counts", messages=HELLO)).input_tokens == 42
    assert engine.requests[0].request.route == ROUTE


async def test_refusals_have_the_form_of_the_api(gateway: Served, node: FakeNode, model: Path) -> None:
    await register(gateway, node, read_by_gateway(model))
    picture = {"type": "image", "source": {"type": "url", "url": "http://127.0.0.1/a.png"}}
    async with anthropic_client(gateway) as client:
        with pytest.raises(anthropic.NotFoundError, match="tokenizer of alpha"):
            await client.messages.count_tokens(model="alpha", messages=HELLO)
        with pytest.raises(anthropic.NotFoundError, match="absent"):
            await client.messages.count_tokens(model="absent", messages=HELLO)
        with pytest.raises(anthropic.BadRequestError, match="does not render"):
            await client.messages.count_tokens(model="counted", messages=[{"role": "user", "content": [picture]}])
        with pytest.raises(anthropic.BadRequestError, match="mcp_servers"):
            await client.messages.count_tokens(model="counted", messages=HELLO, extra_body={"mcp_servers": [{}]})
        with pytest.raises(anthropic.APIStatusError) as long:
            await client.messages.count_tokens(model="counted", messages=[{"role": "user", "content": "x " * 600_000}])
    assert long.value.status_code == 413
    assert isinstance(long.value.body, dict)
    assert long.value.body["error"]["type"] == "request_too_large"


async def test_limits_and_models_of_a_key_hold(pair: tuple[Served, Served], node: FakeNode, model: Path) -> None:
    gateway, _ = pair
    await register(gateway, node, read_by_gateway(model))
    await add_key(gateway, "ci", "sk-ci", requests_per_minute=1)
    await add_key(gateway, "other", "sk-other", models=["beta"])
    async with anthropic.AsyncAnthropic(base_url=gateway.base, api_key="sk-ci", max_retries=0) as client:
        raw = await client.messages.with_raw_response.count_tokens(model="counted", messages=HELLO)
        assert raw.headers["x-ratelimit-remaining-requests"] == "0"
        with pytest.raises(anthropic.RateLimitError):
            await client.messages.count_tokens(model="counted", messages=HELLO)
    async with anthropic.AsyncAnthropic(base_url=gateway.base, api_key="sk-other", max_retries=0) as client:
        with pytest.raises(anthropic.NotFoundError, match="counted"):
            await client.messages.count_tokens(model="counted", messages=HELLO)
    async with anthropic.AsyncAnthropic(base_url=gateway.base, api_key="sk-absent", max_retries=0) as client:
        with pytest.raises(anthropic.AuthenticationError):
            await client.messages.count_tokens(model="counted", messages=HELLO)


async def test_many_counts_at_a_time_are_answered(gateway: Served, node: FakeNode, model: Path) -> None:
    await register(gateway, node, read_by_gateway(model))
    body = {"model": "counted", "messages": [{"role": "user", "content": "word " * 20_000}]}
    answers: list[httpx.Response] = await asyncio.gather(*(gateway.http.post(ROUTE, json=body) for _ in range(20)))
    assert {(answer.status_code, answer.json()["input_tokens"]) for answer in answers} == {(200, answers[0].json()["input_tokens"])}
    assert answers[0].json()["input_tokens"] >= 20_000
