"""The Responses API with the real `openai` client, on engines that have only chat completions."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from shared.errors import EngineFailed
from tests.integration.gateway.clients import openai_client
from tests.integration.gateway.conftest import CARDS, Served, ServeFn, until_listed
from tests.integration.gateway.hosted_models import register_hosted
from tests.support.fake_engine import WORDS, FakeNode, Run, hang

TEXT = "".join(WORDS)


async def test_response_is_parsed(gateway: Served, node: FakeNode) -> None:
    engine = await node.engine("alpha")
    async with openai_client(gateway) as client:
        response = await client.responses.create(
            model="a", input="Hi", instructions="Be brief", max_output_tokens=5, metadata={"k": "v"}, store=False
        )
    assert response.output_text == TEXT
    assert (response.status, response.metadata, response.instructions) == ("completed", {"k": "v"}, "Be brief")
    assert response.usage is not None
    assert (response.usage.input_tokens, response.usage.output_tokens) == (7, len(WORDS))
    assert response.id.startswith("resp_")
    request = engine.requests[0].request
    assert request.endpoint == "chat"
    assert request.body == {
        "model": "a",
        "messages": [{"role": "system", "content": "Be brief"}, {"role": "user", "content": "Hi"}],
        "max_tokens": 5,
    }


async def test_stream_has_the_events_of_the_api(gateway: Served, node: FakeNode) -> None:
    await node.engine("alpha")
    async with (
        openai_client(gateway) as client,
        client.responses.stream(model="alpha", input=[{"role": "user", "content": "Hi"}]) as stream,
    ):
        kinds = [event.type async for event in stream]
        final = await stream.get_final_response()
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds.count("response.output_text.delta") == len(WORDS)
    assert kinds[-1] == "response.completed"
    assert final.output_text == TEXT
    assert final.usage is not None
    assert final.usage.output_tokens == len(WORDS)


async def test_format_is_sent_as_response_format_and_parsed(gateway: Served, node: FakeNode) -> None:
    class Answer(BaseModel):
        name: str

    await register_hosted(gateway, node)

    async def answer(run: Run) -> None:
        schema = run.request.body["response_format"]["json_schema"]
        assert (schema["name"], schema["strict"]) == ("Answer", True)
        await run.respond("application/json", completion('{"name": "né"}'))
        await run.close()

    await node.engine("hosted", answer)
    async with openai_client(gateway) as client:
        response = await client.responses.parse(model="hosted", input="Hi", text_format=Answer)
    assert response.output_parsed == Answer(name="né")


def completion(content: str) -> bytes:
    choice = {"index": 0, "message": {"role": "assistant", "content": content}, "finish_reason": "stop"}
    usage = {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}
    return json.dumps({"id": "x", "created": 5, "choices": [choice], "usage": usage}).encode()


async def test_stream_of_a_hosted_engine_is_translated_however_it_is_cut(gateway: Served, node: FakeNode) -> None:
    await register_hosted(gateway, node)
    call = {"index": 0, "id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    deltas: list[dict[str, Any]] = [{"role": "assistant"}, {"content": "né"}, {"tool_calls": [call]}]
    chunks = [{"created": 5, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
    chunks.append({"created": 5, "choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]})
    data = "".join(f"data: {json.dumps(c, ensure_ascii=False)}\n\n" for c in chunks).encode() + b"data: [DONE]\n\n"

    async def stream(run: Run) -> None:
        assert run.request.body["stream_options"] == {"include_usage": True}
        await run.respond("text/event-stream", *(data[at : at + 50] for at in range(0, len(data), 50)))
        await run.close()

    await node.engine("hosted", stream)
    tool: Any = {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {}}, "strict": False}
    async with openai_client(gateway) as client:
        events = [e async for e in await client.responses.create(model="hosted", input="Hi", stream=True, tools=[tool])]
    last = events[-1]
    assert last.type == "response.completed"
    assert [item.type for item in last.response.output] == ["message", "function_call"]
    assert last.response.output_text == "né"


async def test_waiting_stream_receives_comments_before_its_events(node: FakeNode, serve: ServeFn) -> None:
    async with serve(waking_comment_after=0.05, waking_comment_interval=0.05) as gateway:
        await until_listed(gateway, CARDS)
        asked = {"model": "alpha", "input": "Hi", "stream": True}
        async with gateway.http.stream("POST", "/v1/responses", json=asked) as answer:
            lines = answer.aiter_lines()
            assert (await anext(lines)).startswith(": waking alpha")
            await node.engine("alpha")
            rest = [line async for line in lines]
    assert [line for line in rest if line.startswith("event: ")][-1] == "event: response.completed"
    assert any(line.startswith(": timing") for line in rest)


async def test_failure_after_the_first_token_ends_the_stream_with_an_event(gateway: Served, node: FakeNode) -> None:
    has_text = asyncio.Event()

    async def break_off(run: Run) -> None:
        await run.start()
        await run.text("a")
        await has_text.wait()
        await run.fail(EngineFailed("gone", should_retry=False))

    await node.engine("alpha", break_off)
    async with openai_client(gateway) as client:
        async for last in await client.responses.create(model="alpha", input="Hi", stream=True):
            if last.type == "response.output_text.delta":
                has_text.set()
    assert last.type == "response.failed"
    assert last.response.error is not None
    assert (last.response.error.code, last.response.error.message) == ("engine_failed", "gone")


async def test_failure_before_the_first_token_has_a_status(gateway: Served, node: FakeNode) -> None:
    async def fail(run: Run) -> None:
        await run.fail(EngineFailed("gone", should_retry=False))

    await node.engine("alpha", fail)
    async with openai_client(gateway) as client:
        for stream in (False, True):
            with pytest.raises(openai.InternalServerError, match="gone"):
                await client.responses.create(model="alpha", input="Hi", stream=stream)


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"max_output_tokens": 4000}, "max_output_tokens", "context length"),
        ({"tool_choice": "required"}, "tool_choice", "no tools"),
        ({"temperature": 3}, "temperature", "less than or equal to 2"),
        ({"background": True}, "background", "not supported"),
    ],
)
async def test_invalid_request_is_refused_with_the_clients_own_names(
    gateway: Served, node: FakeNode, fields: dict[str, Any], param: str, words: str
) -> None:
    answer = await gateway.http.post("/v1/responses", json={"model": "alpha", "input": "Hi"} | fields)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param)
    assert words in error["message"]


async def test_client_that_disconnects_ends_the_generation(gateway: Served, node: FakeNode) -> None:
    engine = await node.engine("alpha", hang)
    async with openai_client(gateway) as client:
        stream = await client.responses.create(model="alpha", input="Hi", stream=True)
        async for event in stream:
            if event.type == "response.output_text.delta":
                break
        await stream.close()
    await engine.until(lambda: bool(engine.cancelled))


async def test_idempotent_request_is_generated_once(gateway: Served, node: FakeNode) -> None:
    engine = await node.engine("alpha")
    asked = {"model": "alpha", "input": "Hi", "stream": True}
    answers = [await gateway.http.post("/v1/responses", json=asked, headers={"idempotency-key": "k"}) for _ in range(2)]
    finals = [json.loads(a.text.rpartition("data: ")[2]) for a in answers]
    assert finals[0] == finals[1]
    assert len(engine.requests) == 1
    assert answers[1].headers["idempotent-replayed"] == "true"


async def test_large_request_is_translated_in_the_parser_process(gateway: Served, node: FakeNode) -> None:
    await register_hosted(gateway, node)
    image = "data:image/png;base64," + "A" * 100_000

    async def answer(run: Run) -> None:
        assert run.request.body["messages"][0]["content"][0]["image_url"]["url"] == image
        await run.respond("application/json", completion("seen"))
        await run.close()

    await node.engine("hosted", answer)
    given: Any = [{"role": "user", "content": [{"type": "input_image", "image_url": image, "detail": "auto"}]}]
    async with openai_client(gateway) as client:
        assert (await client.responses.create(model="hosted", input=given)).output_text == "seen"


async def test_error_of_a_hosted_engine_keeps_its_status_and_text(gateway: Served, node: FakeNode) -> None:
    await register_hosted(gateway, node)

    async def refuse(run: Run) -> None:
        body = {"error": {"message": "no images", "type": "invalid_request_error", "param": None, "code": 400}}
        await run.respond("application/json", json.dumps(body).encode(), status=400)
        await run.close()

    await node.engine("hosted", refuse)
    async with openai_client(gateway) as client:
        with pytest.raises(openai.BadRequestError, match="no images"):
            await client.responses.create(model="hosted", input="Hi")
