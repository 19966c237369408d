"""The real openai client against a real mesh: its usual calls, and all its errors."""

from __future__ import annotations

import asyncio
import base64
import re
import struct
import sys
from collections.abc import AsyncIterator, Callable
from enum import Enum
from typing import Annotated, Any

import httpx
import openai
import pytest
from pydantic import BaseModel, Field

from tests.support.launcher import Thaw

SHARED = True
HELLO: list[Any] = [{"role": "user", "content": "Hello"}]


@pytest.fixture
async def clients(mesh: Thaw) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{mesh.url}/v1", api_key="none", timeout=120, max_retries=0) as client:
        yield client


def test_blocking_client_receives_complete_and_streamed_responses(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "one", "messages": HELLO, "temperature": 0, "max_tokens": 8}
    whole = client.chat.completions.create(**asked)
    with client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}) as stream:
        chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole.choices[0].message.content
    assert chunks[-1].usage == whole.usage
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 8
    assert whole.choices[0].finish_reason == "length"


async def test_async_client_sends_concurrent_requests(clients: openai.AsyncOpenAI) -> None:
    async def ask(seed: int) -> str:
        stream = await clients.chat.completions.create(model="one", messages=HELLO, seed=seed, max_tokens=8, stream=True)
        return "".join([c.choices[0].delta.content or "" async for c in stream if c.choices])

    answers = await asyncio.gather(*(ask(i % 4) for i in range(16)))
    assert len({a for i, a in enumerate(answers) if i % 4 == 0}) == 1


async def test_every_parameter_is_accepted(clients: openai.AsyncOpenAI) -> None:
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
        model="one", messages=HELLO, max_tokens=1, extra_body={"nonsense": 1}, extra_headers={"x-client-request-id": "mine"}
    )
    assert raw.headers["x-thaw-ignored"] == "nonsense"
    assert raw.headers["x-client-request-id"] == "mine"
    assert "prefill;dur=" in raw.headers["server-timing"]


async def test_seeds_reproduce_and_n_choices_differ(clients: openai.AsyncOpenAI) -> None:
    asked: dict[str, Any] = {"model": "one", "messages": HELLO, "max_tokens": 8, "temperature": 1}

    async def texts(**fields: Any) -> list[str | None]:
        return [c.message.content for c in (await clients.chat.completions.create(**asked, **fields)).choices]

    several = await texts(seed=5, n=3)
    assert several == await texts(seed=5, n=3)
    assert len(set(several)) == 3
    assert several[:1] == await texts(seed=5)
    assert several[:1] != await texts(seed=6)


async def test_logit_bias_and_stop_strings_are_applied(clients: openai.AsyncOpenAI) -> None:
    asked: dict[str, Any] = {"model": "one", "prompt": "Once upon", "max_tokens": 12, "temperature": 0}
    ids: dict[str, Any] = {"extra_body": {"return_token_ids": True}}
    forced: Any = (await clients.completions.create(**asked, **ids, logit_bias={"40": 100})).choices[0]
    assert forced.token_ids == [40] * 12
    free: Any = (await clients.completions.create(**asked, **ids)).choices[0]
    banned: Any = (await clients.completions.create(**asked, **ids, logit_bias={str(free.token_ids[0]): -100})).choices[0]
    assert free.token_ids[0] not in banned.token_ids
    stop = free.text[4:7]
    stopped = (await clients.completions.create(**asked, stop=[stop])).choices[0]
    assert (stopped.text, stopped.finish_reason) == (free.text[: free.text.index(stop)], "stop")
    stream = await clients.completions.create(**asked, stop=stop, stream=True)
    assert "".join([c.choices[0].text async for c in stream if c.choices]) == stopped.text


class Size(Enum):
    SMALL = "small"
    LARGE = "large"


class Item(BaseModel):
    """A schema whose every value is bounded: a model with random weights completes it."""

    name: Annotated[str, Field(max_length=8)]
    size: Size
    parts: Annotated[list[bool], Field(min_length=1, max_length=3)]


async def test_parsed_response_is_an_instance_of_its_model(clients: openai.AsyncOpenAI) -> None:
    asked: dict[str, Any] = {"model": "one", "messages": HELLO, "max_tokens": 200, "response_format": Item}
    ways: list[dict[str, Any]] = [{"temperature": 0}, {"temperature": 1, "seed": 4}]
    for fields in ways:
        choice = (await clients.chat.completions.parse(**asked, **fields)).choices[0]
        assert choice.finish_reason == "stop"
        assert isinstance(choice.message.parsed, Item)
        async with clients.chat.completions.stream(**asked, **fields) as stream:
            final = await stream.get_final_completion()
        assert final.choices[0].message.parsed == choice.message.parsed
    with pytest.raises(openai.LengthFinishReasonError):
        await clients.chat.completions.parse(**asked | {"max_tokens": 3})


async def test_choices_and_expressions_constrain_text(clients: openai.AsyncOpenAI) -> None:
    formats: list[tuple[dict[str, Any], str]] = [
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes|no"),
        ({"guided_regex": "[a-f]{3}-[0-9]{2}"}, "[a-f]{3}-[0-9]{2}"),
    ]
    for body, expected in formats:
        answer = await clients.completions.create(model="one", prompt="Once upon", max_tokens=20, n=2, extra_body=body)
        assert all(re.fullmatch(expected, choice.text) for choice in answer.choices)


async def test_log_probabilities_have_the_openai_shape(clients: openai.AsyncOpenAI) -> None:
    asked: dict[str, Any] = {"model": "one", "max_tokens": 4, "temperature": 0}
    chat = (await clients.chat.completions.create(**asked, messages=HELLO, logprobs=True, top_logprobs=2)).choices[0]
    assert chat.logprobs is not None
    assert chat.logprobs.content is not None
    assert "".join(t.token for t in chat.logprobs.content) == chat.message.content
    assert all(t.logprob == t.top_logprobs[0].logprob <= 0 for t in chat.logprobs.content)
    # The text of a token that is a part of a character is U+FFFD. Its bytes are those of the part.
    assert [bytes(t.bytes or ()).decode(errors="replace") for t in chat.logprobs.content] == [
        t.token for t in chat.logprobs.content
    ]
    text = (await clients.completions.create(**asked, prompt="Once upon", logprobs=2)).choices[0]
    found = text.logprobs
    assert found is not None
    assert found.tokens is not None
    assert found.top_logprobs is not None
    assert "".join(found.tokens) == text.text
    assert found.text_offset == [sum(map(len, found.tokens[:i])) for i in range(4)]
    assert [p[t] for p, t in zip(found.top_logprobs, found.tokens, strict=True)] == found.token_logprobs


async def test_prompts_may_be_texts_or_token_ids(clients: openai.AsyncOpenAI) -> None:
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


async def test_embeddings_are_equal_in_each_encoding(clients: openai.AsyncOpenAI) -> None:
    asked: dict[str, Any] = {"model": "one", "input": ["a", "b c"]}
    usual = await clients.embeddings.create(**asked)
    floats = await clients.embeddings.create(**asked, encoding_format="float")
    coded: Any = await clients.embeddings.create(**asked, encoding_format="base64")
    assert len(usual.data) == 2
    for first, second, third in zip(usual.data, floats.data, coded.data, strict=True):
        raw = base64.b64decode(third.embedding)
        assert first.embedding == pytest.approx(second.embedding, rel=1e-6)
        assert list(struct.unpack(f"<{len(raw) // 4}f", raw)) == pytest.approx(first.embedding, rel=1e-6)


async def test_models_are_listed_and_retrieved(clients: openai.AsyncOpenAI) -> None:
    assert {m.id async for m in clients.models.list()} >= {"one", "two", "three"}
    model = await clients.models.retrieve("one")
    assert model.model_dump()["context_length"] > 0


async def test_cancelled_stream_stops_its_engine(clients: openai.AsyncOpenAI, admin: httpx.Client) -> None:
    stream = await clients.chat.completions.create(
        model="one", messages=HELLO, max_tokens=400, stream=True, extra_body={"ignore_eos": True}
    )
    async for chunk in stream:
        if chunk.choices and chunk.choices[0].delta.content:
            break
    await stream.close()
    async with asyncio.timeout(120):
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


async def test_a_second_gateway_started_by_hand(mesh: Thaw, clients: openai.AsyncOpenAI, new_port: Callable[[], int]) -> None:
    port = new_port()
    environment = mesh.environment | {"THAW_NATS_URL": mesh.endpoints["nats_url"], "THAW_GATEWAY_PORT": str(port)}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "services.gateway", env=environment, stderr=asyncio.subprocess.DEVNULL
    )
    other = openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", timeout=120, max_retries=0)
    try:
        async with asyncio.timeout(120):
            while await _status(f"http://127.0.0.1:{port}/ready") != 200:  # noqa: ASYNC110 - what is waited for is behind HTTP
                await asyncio.sleep(0.05)
        asked: dict[str, Any] = {"model": "one", "messages": HELLO, "max_tokens": 100, "extra_headers": {"idempotency-key": "two"}}
        answers = await asyncio.gather(*(c.chat.completions.create(**asked) for c in (clients, other, clients, other)))
        assert len({a.id for a in answers}) == 1
        stream = await other.chat.completions.create(
            model="one", messages=HELLO, max_tokens=100, stream=True, extra_body={"ignore_eos": True}
        )
        await anext(stream)
        process.terminate()
        reasons = [c.choices[0].finish_reason async for c in stream if c.choices]
        assert reasons[-1] == "length", "a gateway that is stopped finishes its streams"
        async with asyncio.timeout(120):
            assert await process.wait() == 0
    finally:
        await other.close()
        if process.returncode is None:
            process.kill()
            await process.wait()


async def _status(url: str) -> int:
    async with httpx.AsyncClient() as client:
        try:
            return (await client.get(url)).status_code
        except httpx.TransportError:
            return 0


REFUSED: list[tuple[dict[str, Any], type[openai.APIStatusError], str, str | None]] = [
    ({"model": "nobody"}, openai.NotFoundError, "model_not_found", "model"),
    ({"temperature": 3}, openai.BadRequestError, "invalid_request", "temperature"),
    ({"messages": []}, openai.BadRequestError, "invalid_request", "messages"),
    ({"messages": [{"role": "user"}]}, openai.BadRequestError, "invalid_request", "messages[0]"),
    ({"response_format": {"type": "structural_tag"}}, openai.BadRequestError, "unsupported_parameter", "response_format"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "objec"}}}},
        openai.BadRequestError,
        "invalid_request",
        "response_format",
    ),
    ({"tool_choice": "required"}, openai.BadRequestError, "invalid_request", "tool_choice"),
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
async def test_invalid_parameters_are_refused(
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


async def test_unsupported_routes_return_not_found(clients: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        await clients.images.generate(model="one", prompt="x")
    with pytest.raises(openai.NotFoundError):
        await clients.moderations.create(model="one", input="x")
