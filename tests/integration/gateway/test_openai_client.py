"""The real `openai` client against a gateway."""

from __future__ import annotations

import asyncio
import base64
import struct
from typing import Any

import openai
import pytest

from services.gateway.authorization import hash_key
from shared.contracts.inference import EmbeddingsFinished, EmbeddingsPart, Usage
from shared.errors import (
    Conflict,
    ContextLengthExceeded,
    DeadlineExceeded,
    EngineFailed,
    InvalidModel,
    InvalidRequest,
    NotFound,
    PayloadTooLarge,
    PermissionDenied,
    QueueFull,
    ThawError,
    Unavailable,
)
from tests.integration.gateway.clients import openai_client
from tests.integration.gateway.conftest import Served, ServeFn, chat
from tests.support.fake_engine import WORDS, FakeNode, Run, drain, hang, speak

TEXT = "".join(WORDS)


async def test_chat_completion_is_parsed(gateway: Served, node: FakeNode) -> None:
    await node.engine("alpha")
    async with openai_client(gateway) as client:
        answer = await client.chat.completions.create(**chat("a"))
        assert answer.choices[0].message.content == TEXT
        assert answer.choices[0].finish_reason == "stop"
        assert answer.usage is not None
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (7, len(WORDS))
        assert answer.id.startswith("chatcmpl-")
        assert answer._request_id


async def test_a_streamed_chat_completion(gateway: Served, node: FakeNode) -> None:
    await node.engine("alpha")
    async with openai_client(gateway) as client:
        stream = await client.chat.completions.create(**chat(stream=True, stream_options={"include_usage": True}))
        chunks = [c async for c in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == TEXT
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.total_tokens == 7 + len(WORDS)
    assert len({c.id for c in chunks}) == 1


async def test_text_completions_are_parsed(gateway: Served, node: FakeNode) -> None:
    async def echo(run: Run) -> None:
        await run.start()
        for i, prompt in enumerate(run.request.body["prompt"]):
            await run.text(prompt.upper(), index=i)
        await run.end(2)

    await node.engine("alpha", echo)
    async with openai_client(gateway) as client:
        answer = await client.completions.create(model="alpha", prompt=["one", "two"], max_tokens=5)
        assert [c.text for c in answer.choices] == ["ONE", "TWO"]
        stream = await client.completions.create(model="alpha", prompt=["one", "two"], max_tokens=5, stream=True)
        assert [(c.choices[0].index, c.choices[0].text) async for c in stream] == [(0, "ONE"), (1, "TWO")]


@pytest.mark.parametrize("encoding", [openai.omit, "float", "base64"])
async def test_embeddings_are_parsed_in_each_encoding(gateway: Served, node: FakeNode, encoding: Any) -> None:
    await node.engine("vectors")
    async with openai_client(gateway) as client:
        answer = await client.embeddings.create(model="vectors", input=["x", "y"], encoding_format=encoding)
    vectors = [d.embedding for d in answer.data]
    if encoding != "base64":
        assert vectors == [[0.0, 0.5, -1.0], [1.0, 0.5, -1.0]]
    else:
        assert all(isinstance(v, str) for v in vectors)


@pytest.mark.parametrize("encoding", ["float", "base64"])
async def test_embeddings_in_several_messages(gateway: Served, node: FakeNode, encoding: Any) -> None:
    """Embeddings arrive in several messages.

    Output of an engine that died is not part of the response.
    """
    runs = 0

    async def in_parts(run: Run) -> None:
        nonlocal runs
        runs += 1
        inputs = range(len(run.request.body["input"]))
        vectors = [base64.b64encode(struct.pack("<2f", i, runs)).decode() for i in inputs]
        await run.start()
        for i in inputs[:-100:100]:
            await run.say(EmbeddingsPart(seq=0, vectors=tuple(vectors[i : i + 100])))
        if runs == 1:
            await run.fail(EngineFailed("it died"), engine_lost=True)
        else:
            await run.say(EmbeddingsFinished(seq=0, dimensions=2, vectors=tuple(vectors[-100:]), usage=Usage(prompt_tokens=7)))

    await node.engine("vectors", in_parts)
    async with openai_client(gateway) as client:
        answer = await client.embeddings.create(model="vectors", input=["x"] * 1000, encoding_format=encoding)
    assert runs == 2
    assert [d.index for d in answer.data] == list(range(1000))
    vectors: list[Any] = [d.embedding for d in answer.data]
    floats = vectors if encoding == "float" else [list(struct.unpack("<2f", base64.b64decode(v))) for v in vectors]
    assert floats == [[float(i), 2.0] for i in range(1000)]


async def test_models_are_listed_and_retrieved(gateway: Served) -> None:
    async with openai_client(gateway) as client:
        assert {m.id async for m in client.models.list()} >= {"alpha", "beta"}
        model = await client.models.retrieve("org/alpha")
        assert model.id == "alpha"
        assert model.model_dump()["context_length"] == 2048
        with pytest.raises(openai.NotFoundError) as caught:
            await client.models.retrieve("nobody")
        assert caught.value.code == "model_not_found"


async def test_engine_error_keeps_its_class(gateway: Served, node: FakeNode) -> None:
    async def refuse(run: Run) -> None:
        await run.start()
        await run.fail(ContextLengthExceeded("too long", param="messages"))

    await node.engine("alpha", refuse)
    async with openai_client(gateway) as client:
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(**chat(stream=True))
        assert caught.value.code == "context_length_exceeded"
        assert caught.value.param == "messages"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (InvalidRequest("x", param="messages"), openai.BadRequestError),
        (PermissionDenied("x"), openai.PermissionDeniedError),
        (NotFound("x"), openai.NotFoundError),
        (Conflict("x"), openai.ConflictError),
        (PayloadTooLarge("x"), openai.APIStatusError),
        (InvalidModel("x"), openai.UnprocessableEntityError),
        (QueueFull("x", retry_after_ms=1500), openai.RateLimitError),
        (EngineFailed("x"), openai.InternalServerError),
        (Unavailable("x"), openai.InternalServerError),
        (DeadlineExceeded("x"), openai.InternalServerError),
    ],
    ids=lambda v: getattr(v, "code", ""),
)
async def test_every_error_has_its_openai_exception(
    gateway: Served, node: FakeNode, error: ThawError, kind: type[openai.APIStatusError], stream: bool
) -> None:
    async def refuse(run: Run) -> None:
        await run.fail(error)

    await node.engine("alpha", refuse)
    async with openai_client(gateway) as client:
        with pytest.raises(kind) as caught:
            await client.chat.completions.create(**chat(stream=stream))
    found = caught.value
    assert (found.status_code, found.code, found.type, found.param) == (error.status, error.code, error.type, error.param)
    assert found.request_id
    if error.retry_after_ms:
        assert (found.response.headers["retry-after"], found.response.headers["retry-after-ms"]) == ("2", "1500")


async def test_an_error_in_a_stream_is_raised_by_the_client(gateway: Served, node: FakeNode) -> None:
    has_read = asyncio.Event()

    async def break_off(run: Run) -> None:
        await run.start()
        await run.text("Hello")
        await has_read.wait()
        await run.fail(EngineFailed("it broke"))

    await node.engine("alpha", break_off)
    async with openai_client(gateway) as client:
        stream = await client.chat.completions.create(**chat(stream=True))
        await anext(stream)
        has_read.set()
        with pytest.raises(openai.APIError, match="it broke") as caught:
            async for _ in stream:
                pass
    assert caught.value.code == "engine_failed"


async def test_a_wrong_key_is_an_authentication_error(node: FakeNode, serve: ServeFn) -> None:
    async with serve(api_keys=hash_key("sk-right")) as gateway, openai_client(gateway) as client:
        with pytest.raises(openai.AuthenticationError) as caught:
            await client.models.list()
        assert caught.value.code == "invalid_api_key"
        await client.with_options(api_key="sk-right").models.list()


async def test_leaving_a_stream_stops_the_engine(gateway: Served, node: FakeNode) -> None:
    engine = await node.engine("alpha", hang)
    async with openai_client(gateway) as client:
        stream = await client.chat.completions.create(**chat(stream=True))
        async for chunk in stream:
            if chunk.choices[0].delta.content:
                break
        await stream.close()
        await engine.until(lambda: len(engine.cancelled) == 1)
    assert engine.cancelled == [engine.requests[0].request.request_id]


async def test_a_draining_engine_is_passed_over(gateway: Served, node: FakeNode) -> None:
    draining = await node.engine("alpha", drain)
    async with openai_client(gateway) as client:
        waiting = asyncio.create_task(client.chat.completions.create(**chat()))
        await draining.until(lambda: len(draining.requests) >= 1)
        await node.engine("alpha")
        assert (await waiting).choices[0].message.content == TEXT


async def test_blocking_client_receives_complete_and_streamed_responses(gateway: Served, node: FakeNode) -> None:
    await node.engine("alpha")

    def ask() -> tuple[str | None, str]:
        with openai.OpenAI(base_url=f"{gateway.base}/v1", api_key="none", max_retries=0, timeout=60) as client:
            whole = client.chat.completions.create(**chat()).choices[0].message.content
            parts = [c.choices[0].delta.content or "" for c in client.chat.completions.create(**chat(stream=True))]
            return whole, "".join(parts)

    assert await asyncio.to_thread(ask) == (TEXT, TEXT)


async def test_retry_headers_control_the_clients_retries(gateway: Served, node: FakeNode) -> None:
    async def unlucky(run: Run) -> None:
        if len(run.engine.requests) == 1:
            await run.fail(EngineFailed("once"))
        else:
            await speak(run)

    engine = await node.engine("alpha", unlucky)
    async with openai_client(gateway).with_options(max_retries=2) as client:
        assert (await client.chat.completions.create(**chat())).choices[0].message.content == TEXT
        assert len(engine.requests) == 2
        with pytest.raises(openai.InternalServerError) as caught:
            await client.chat.completions.create(**chat("hasty"))
    assert caught.value.code == "queue_timeout"
    # Each request ends with one report: the client has not retried.
    await node.until_demand(lambda: any(d.model == "hasty" and d.waiting == 0 for d in node.demand))
    assert sum(d.model == "hasty" and d.waiting == 0 for d in node.demand) == 1
