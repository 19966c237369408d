"""The Messages API with the real `anthropic` client, on engines that have only chat completions."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import anthropic
import pytest

from shared.errors import EngineFailed
from tests.integration.gateway.clients import anthropic_client
from tests.integration.gateway.conftest import Served
from tests.integration.gateway.hosted_models import register_hosted
from tests.support.fake_engine import WORDS, FakeNode, Run, hang

HELLO: list[Any] = [{"role": "user", "content": "Hi"}]
TEXT = "".join(WORDS)


async def test_message_is_parsed(gateway: Served, node: FakeNode) -> None:
    engine = await node.engine("alpha")
    async with anthropic_client(gateway) as client:
        message = await client.messages.create(model="a", max_tokens=5, system="Be brief", messages=HELLO)
    assert (message.content[0].text, message.stop_reason, message.model) == (TEXT, "end_turn", "a")
    assert (message.usage.input_tokens, message.usage.output_tokens) == (7, len(WORDS))
    assert engine.requests[0].request.endpoint == "chat"
    assert engine.requests[0].request.body["messages"][0] == {"role": "system", "content": "Be brief"}


async def test_stream_has_the_events_of_the_api(gateway: Served, node: FakeNode) -> None:
    await node.engine("alpha")
    async with anthropic_client(gateway) as client, client.messages.stream(model="alpha", max_tokens=5, messages=HELLO) as stream:
        texts = [text async for text in stream.text_stream]
        final = await stream.get_final_message()
    assert texts == list(WORDS)
    assert (final.content[0].text, final.stop_reason, final.usage.output_tokens) == (TEXT, "end_turn", len(WORDS))


async def test_tools_reach_a_hosted_engine_and_its_call_is_a_block(gateway: Served, node: FakeNode) -> None:
    await register_hosted(gateway, node)
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"city": "né"}'}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}

    async def answer(run: Run) -> None:
        asked = run.request.body
        assert asked["tools"][0]["function"]["name"] == "f"
        assert asked["tool_choice"] == "required"
        if asked.get("stream"):
            delta = {"role": "assistant", "tool_calls": [call | {"index": 0}]}
            choice = {"index": 0, "delta": delta, "finish_reason": "tool_calls"}
            data = json.dumps({"choices": [choice]}, ensure_ascii=False).encode()
            await run.respond("text/event-stream", b"data: " + data[:30], data[30:] + b"\n\ndata: [DONE]\n\n")
        else:
            choice = {"index": 0, "message": message, "finish_reason": "tool_calls"}
            usage = {"prompt_tokens": 7, "completion_tokens": 3}
            await run.respond("application/json", json.dumps({"choices": [choice], "usage": usage}).encode())
        await run.close()

    await node.engine("hosted", answer)
    asked: dict[str, Any] = {
        "model": "hosted",
        "max_tokens": 5,
        "messages": HELLO,
        "tools": [{"name": "f", "input_schema": {"type": "object"}}],
        "tool_choice": {"type": "any"},
    }
    async with anthropic_client(gateway) as client:
        whole = await client.messages.create(**asked)
        async with client.messages.stream(**asked) as stream:
            streamed = await stream.get_final_message()
    for made in (whole, streamed):
        assert made.stop_reason == "tool_use"
        assert [(b.type, b.id, b.name, b.input) for b in made.content] == [("tool_use", "c", "f", {"city": "né"})]


async def test_errors_have_the_form_of_the_api(gateway: Served, node: FakeNode) -> None:
    await register_hosted(gateway, node)

    async def refuse(run: Run) -> None:
        await run.respond("application/json", b'{"error": {"message": "no images", "code": 400}}', status=400)
        await run.close()

    await node.engine("hosted", refuse)
    async with anthropic_client(gateway) as client:
        with pytest.raises(anthropic.BadRequestError) as caught:
            await client.messages.create(model="hosted", max_tokens=5, messages=HELLO)
        assert caught.value.body == {"type": "error", "error": {"type": "invalid_request_error", "message": "no images"}}
        with pytest.raises(anthropic.NotFoundError):
            await client.messages.create(model="unknown", max_tokens=5, messages=HELLO)
        thinking = {"type": "enabled", "budget_tokens": 1024}
        with pytest.raises(anthropic.BadRequestError, match="thinking"):
            await client.messages.create(model="alpha", max_tokens=2048, messages=HELLO, thinking=thinking)


async def test_failure_after_the_first_token_is_raised_by_the_client(gateway: Served, node: FakeNode) -> None:
    has_text = asyncio.Event()

    async def break_off(run: Run) -> None:
        await run.start()
        await run.text("a")
        await has_text.wait()
        await run.fail(EngineFailed("gone", should_retry=False))

    async def read(client: Any) -> None:
        async for event in await client.messages.create(model="alpha", max_tokens=5, messages=HELLO, stream=True):
            if event.type == "content_block_delta":
                has_text.set()

    await node.engine("alpha", break_off)
    async with anthropic_client(gateway) as client:
        with pytest.raises(anthropic.APIStatusError, match="gone"):
            await read(client)


async def test_client_that_disconnects_ends_the_generation(gateway: Served, node: FakeNode) -> None:
    engine = await node.engine("alpha", hang)
    async with anthropic_client(gateway) as client:
        stream = await client.messages.create(model="alpha", max_tokens=5, messages=HELLO, stream=True)
        async for event in stream:
            if event.type == "content_block_delta":
                break
        await stream.close()
    await engine.until(lambda: bool(engine.cancelled))


async def test_repeated_idempotent_request_gets_the_same_message(gateway: Served, node: FakeNode) -> None:
    engine = await node.engine("alpha")
    asked = {"model": "alpha", "max_tokens": 5, "messages": HELLO}
    answers = [await gateway.http.post("/v1/messages", json=asked, headers={"idempotency-key": "k"}) for _ in range(2)]
    assert answers[0].json() == answers[1].json()
    assert len(engine.requests) == 1
