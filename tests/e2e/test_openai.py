"""The real openai client against a real mesh: what it is used for, and every error it knows."""

from __future__ import annotations

import asyncio
import base64
import struct
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest

from tests.support.launcher import Thaw

HELLO: list[Any] = [{"role": "user", "content": "Hello"}]


@pytest.fixture
async def clients(mesh: Thaw) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{mesh.url}/v1", api_key="none", timeout=120, max_retries=0) as client:
        yield client


def test_the_blocking_client(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "one", "messages": HELLO, "temperature": 0, "max_tokens": 8}
    whole = client.chat.completions.create(**asked)
    with client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}) as stream:
        chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole.choices[0].message.content
    assert chunks[-1].usage == whole.usage
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 8
    assert whole.choices[0].finish_reason == "length"


async def test_the_async_client_with_many_at_once(clients: openai.AsyncOpenAI) -> None:
    async def ask(seed: int) -> str:
        stream = await clients.chat.completions.create(model="one", messages=HELLO, seed=seed, max_tokens=8, stream=True)
        return "".join([c.choices[0].delta.content or "" async for c in stream if c.choices])

    answers = await asyncio.gather(*(ask(i % 4) for i in range(16)))
    assert len({a for i, a in enumerate(answers) if i % 4 == 0}) == 1


async def test_every_parameter(clients: openai.AsyncOpenAI) -> None:
    answer = await clients.chat.completions.create(
        model="one",
        messages=HELLO,
        temperature=0.7,
        top_p=0.9,
        n=2,
        seed=7,
        max_completion_tokens=6,
        stop=["\u0000never"],
        presence_penalty=0.5,
        frequency_penalty=0.5,
        logit_bias={"5": -100},
        logprobs=True,
        top_logprobs=2,
        user="me",
        metadata={"k": "v"},
        store=False,
        service_tier="auto",
        extra_body={"top_k": 20, "min_p": 0.01, "repetition_penalty": 1.1, "nonsense": 1},
    )
    assert len(answer.choices) == 2
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert all(len(t.top_logprobs) == 2 for t in logprobs.content)
    raw = await clients.chat.completions.with_raw_response.create(
        model="one", messages=HELLO, max_tokens=1, extra_body={"nonsense": 1}, extra_headers={"x-request-id": "mine"}
    )
    assert raw.headers["x-thaw-ignored"] == "nonsense"
    assert raw.headers["x-request-id"] == "mine"
    assert "prefill;dur=" in raw.headers["server-timing"]


async def test_texts_and_token_ids_one_and_many(clients: openai.AsyncOpenAI) -> None:
    asked: dict[str, Any] = {"model": "one", "max_tokens": 4, "temperature": 0}
    one = await clients.completions.create(prompt="Once upon", **asked)
    ids: Any = (
        (await clients.completions.create(prompt="Once upon", **asked, extra_body={"return_token_ids": True}))
        .choices[0]
        .model_extra
    )
    by_ids = await clients.completions.create(prompt=ids["prompt_token_ids"], **asked)
    both = await clients.completions.create(prompt=["Once upon", "A"], **asked)
    assert one.choices[0].text == by_ids.choices[0].text == both.choices[0].text
    assert [c.index for c in both.choices] == [0, 1]


async def test_embeddings(clients: openai.AsyncOpenAI) -> None:
    asked: dict[str, Any] = {"model": "one", "input": ["a", "b c"]}
    usual = await clients.embeddings.create(**asked)
    floats = await clients.embeddings.create(**asked, encoding_format="float")
    coded: Any = await clients.embeddings.create(**asked, encoding_format="base64")
    assert len(usual.data) == 2
    for first, second, third in zip(usual.data, floats.data, coded.data, strict=True):
        raw = base64.b64decode(third.embedding)
        assert first.embedding == pytest.approx(second.embedding, rel=1e-6)
        assert list(struct.unpack(f"<{len(raw) // 4}f", raw)) == pytest.approx(first.embedding, rel=1e-6)


async def test_models(clients: openai.AsyncOpenAI) -> None:
    assert {m.id async for m in clients.models.list()} >= {"one", "two", "three"}
    model = await clients.models.retrieve("one")
    assert model.model_dump()["context_length"] > 0


async def test_a_cancelled_stream_stops_its_engine(clients: openai.AsyncOpenAI, admin: httpx.Client) -> None:
    stream = await clients.chat.completions.create(
        model="one", messages=HELLO, max_tokens=400, stream=True, extra_body={"ignore_eos": True}
    )
    async for chunk in stream:
        if chunk.choices and chunk.choices[0].delta.content:
            break
    await stream.close()
    async with asyncio.timeout(10):
        while _active(admin) > 0:  # noqa: ASYNC110 - what is waited for is behind HTTP
            await asyncio.sleep(0.05)


def _active(admin: httpx.Client) -> int:
    nodes = admin.get("cluster").raise_for_status().json()["nodes"]
    return sum(i["load"]["active"] + i["load"]["waiting"] for n in nodes for i in n["instances"])


async def test_a_repetition_with_a_key_is_the_same_answer(clients: openai.AsyncOpenAI) -> None:
    asked: dict[str, Any] = {"model": "one", "messages": HELLO, "max_tokens": 12, "extra_headers": {"idempotency-key": "e2e-1"}}
    answers = await asyncio.gather(*(clients.chat.completions.create(**asked) for _ in range(4)))
    assert len({a.id for a in answers}) == 1
    assert len({a.choices[0].message.content for a in answers}) == 1
    later = await clients.chat.completions.create(**asked)
    assert later == answers[0]
    with pytest.raises(openai.UnprocessableEntityError) as caught:
        await clients.chat.completions.create(**asked | {"max_tokens": 13})
    assert caught.value.code == "idempotency_key_reused"


REFUSED: list[tuple[dict[str, Any], type[openai.APIStatusError], str, str | None]] = [
    ({"model": "nobody"}, openai.NotFoundError, "model_not_found", "model"),
    ({"temperature": 3}, openai.BadRequestError, "invalid_request", "temperature"),
    ({"messages": []}, openai.BadRequestError, "invalid_request", "messages"),
    ({"messages": [{"role": "user"}]}, openai.BadRequestError, "invalid_request", "messages[0]"),
    ({"response_format": {"type": "json_object"}}, openai.BadRequestError, "unsupported_parameter", "response_format"),
    ({"tool_choice": "required"}, openai.BadRequestError, "unsupported_parameter", "tool_choice"),
    ({"messages": [{"role": "user", "content": "word " * 20_000}]}, openai.BadRequestError, "context_length_exceeded", "messages"),
    ({"max_tokens": 10**6}, openai.BadRequestError, "context_length_exceeded", "max_tokens"),
    ({"logit_bias": {"99999999": 1}}, openai.BadRequestError, "invalid_request", "logit_bias"),
    ({"extra_body": {"bad_words": ["x"]}}, openai.BadRequestError, "unsupported_parameter", "bad_words"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        openai.BadRequestError,
        "unsupported_parameter",
        "messages[0].content",
    ),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("fields", "kind", "code", "param"), REFUSED)
async def test_refusals(
    clients: openai.AsyncOpenAI,
    fields: dict[str, Any],
    kind: type[openai.APIStatusError],
    code: str,
    param: str | None,
    stream: bool,
) -> None:
    asked: dict[str, Any] = {"model": "one", "messages": HELLO, "max_tokens": 4, "stream": stream} | fields
    with pytest.raises(kind) as caught:
        await clients.chat.completions.create(**asked)
    assert (caught.value.code, caught.value.param) == (code, param)
    assert caught.value.request_id


async def test_routes_that_nobody_serves(clients: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        await clients.responses.create(model="one", input="x")
    with pytest.raises(openai.NotFoundError):
        await clients.moderations.create(model="one", input="x")
