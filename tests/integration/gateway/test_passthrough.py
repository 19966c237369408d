"""HTTP responses of engines.

On routes that only an engine serves, and on OpenAI's routes in the engine's own format.
"""

from __future__ import annotations

import asyncio
import base64
import json
from typing import Any

import httpx
import pytest

from services.gateway.domain.failover import MAX_ENGINE_DEATHS
from shared.contracts.node import InstanceState
from shared.errors import EngineFailed
from tests.integration.gateway.conftest import Served, ServeFn, chat
from tests.integration.gateway.hosted_models import EVENTS, register
from tests.support.fake_engine import FakeNode, Run


@pytest.fixture
async def http(gateway: Served, node: FakeNode) -> httpx.AsyncClient:
    await register(gateway, node)
    return gateway.http


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "own", "input": "né"} | fields


async def test_a_stream_is_passed_on_byte_for_byte(http: httpx.AsyncClient, node: FakeNode) -> None:
    parts = [
        b"event: response.created\r\ndata: {}\r\n\r\n",
        b"data: \xc3",
        b"\xa9\n\nid: 7\n\n",
        b": own comment\n\ndata: [END]\n\n",
    ]
    go = [asyncio.Event() for _ in parts]

    async def slowly(run: Run) -> None:
        await run.respond(f"{EVENTS}; charset=utf-8", headers={"x-engine": "e", "connection": "close"})
        for part, event in zip(parts, go, strict=True):
            await run.data(part)
            await event.wait()
        await run.close()

    await node.engine("own", slowly)
    async with http.stream("POST", "/v1/responses", json=body(stream=True)) as answer:
        assert (answer.status_code, answer.headers["content-type"]) == (200, f"{EVENTS}; charset=utf-8")
        assert answer.headers["x-engine"] == "e"
        assert "queue;dur=" in answer.headers["server-timing"]
        got = answer.aiter_raw()
        for part, event in zip(parts, go, strict=True):
            assert await anext(got) == part
            event.set()
        assert [rest async for rest in got] == []


@pytest.mark.parametrize(
    ("route", "event"),
    [
        ("/v1/responses", {"type": "error", "code": "engine_failed", "message": "gone", "param": None, "sequence_number": 1}),
        ("/v1/messages", {"type": "error", "error": {"type": "api_error", "message": "gone"}}),
        ("/v1/rerank", {"error": {"message": "gone", "type": "server_error", "param": None, "code": "engine_failed"}}),
    ],
)
async def test_broken_stream_ends_with_an_error_of_its_api(
    http: httpx.AsyncClient, node: FakeNode, route: str, event: dict[str, Any]
) -> None:
    read = asyncio.Event()

    async def broken(run: Run) -> None:
        await run.respond(EVENTS, b"data: {}\n\n", b"data: {")
        await read.wait()
        await run.fail(EngineFailed("gone"))

    await node.engine("own", broken)
    async with http.stream("POST", route, json=body(stream=True)) as answer:
        text = ""
        async for part in answer.aiter_text():
            text += part
            if text == "data: {}\n\ndata: {":
                read.set()
    assert text.startswith("data: {}\n\ndata: {\n\n")
    last = text.removesuffix("\n\n").split("\n\n")[-1]
    assert json.loads(last.split("data: ", 1)[1]) == event
    assert last.startswith("event: error\n") == (route != "/v1/rerank")


async def test_binary_responses_keep_their_type_and_are_cut_off_on_failure(http: httpx.AsyncClient, node: FakeNode) -> None:
    sound = bytes(range(256)) * 64
    whole, read = True, asyncio.Event()

    async def speech(run: Run) -> None:
        await run.respond("audio/mpeg", sound[:1000])
        await read.wait()
        await run.data(sound[1000:])
        if whole:
            await run.close()
        else:
            await run.fail(EngineFailed("gone"))

    await node.engine("own", speech)
    async with http.stream("POST", "/v1/audio/speech", json=body(voice="x")) as answer:
        assert answer.headers["content-type"] == "audio/mpeg"
        parts = answer.aiter_raw()
        assert await anext(parts) == sound[:1000]
        read.set()
        assert b"".join([part async for part in parts]) == sound[1000:]
    whole = False
    read.clear()
    async with http.stream("POST", "/v1/audio/speech", json=body(voice="x")) as broken:
        parts = broken.aiter_raw()
        await anext(parts)
        read.set()
        with pytest.raises(httpx.RemoteProtocolError):
            _ = [part async for part in parts]


async def test_status_of_the_engine_is_kept_with_its_message(http: httpx.AsyncClient, node: FakeNode) -> None:
    async def refuse(run: Run) -> None:
        await run.respond("application/json", b'{"detail":', b' "no"}', status=422, headers={"retry-after": "3"})
        await run.close()

    await node.engine("own", refuse)
    for asked in (body(), body(stream=True)):
        answer = await http.post("/v1/responses", json=asked)
        assert (answer.status_code, answer.headers["retry-after"]) == (422, "3")
        assert answer.json()["error"]["message"] == "The engine answered with status 422: no"
    assert 'http_response_status_code="422"' in (await http.get("/metrics")).text


async def test_truncated_json_response_is_an_error_with_a_status(http: httpx.AsyncClient, node: FakeNode) -> None:
    async def broken(run: Run) -> None:
        await run.respond("application/json", b'{"half":')
        await run.fail(EngineFailed("gone"))

    await node.engine("own", broken)
    answer = await http.post("/v1/messages", json=body())
    assert (answer.status_code, answer.json()["error"]) == (500, {"type": "api_error", "message": "gone"})


async def test_a_form_reaches_the_engine_unchanged(http: httpx.AsyncClient, node: FakeNode) -> None:
    async def echo(run: Run) -> None:
        await run.respond("text/plain; charset=utf-8", b"hello")
        await run.close()

    engine = await node.engine("own", echo)
    sound = bytes(range(256)) * 100
    request = http.build_request(
        "POST",
        "/v1/audio/transcriptions?x=%20y",
        data={"model": "own", "language": "fr"},
        files={"file": ("model.wav", sound, "audio/wav")},
        headers={"openai-beta": "b", "authorization": "Bearer secret"},
    )
    await request.aread()
    answer = await http.send(request)
    assert (answer.status_code, answer.text) == (200, "hello")
    asked = engine.requests[0].request
    assert base64.b64decode(asked.data or "") == request.content
    assert asked.content_type == request.headers["content-type"]
    assert (asked.method, asked.route, asked.query, asked.body) == ("POST", "/v1/audio/transcriptions", "x=%20y", {})
    assert asked.headers["openai-beta"] == "b"
    assert "authorization" not in asked.headers


async def test_invalid_or_oversize_forms_are_refused(http: httpx.AsyncClient, serve: ServeFn, node: FakeNode) -> None:
    url = "/v1/audio/transcriptions"
    answer = await http.post(url, files={"file": b"x"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "model")
    answer = await http.post(url, content=b"--b\r\n", headers={"content-type": "multipart/form-data; boundary=b"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_request")
    answer = await http.post("/v1/audio/unknown", files={"file": b"x"})
    assert answer.status_code == 404
    async with serve(max_body_bytes=4096) as small:
        await register(small, node)
        answer = await small.http.post(url, data={"model": "own"}, files={"file": b"x" * 5000})
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "payload_too_large")


async def test_engine_may_answer_openai_routes_in_its_own_format(http: httpx.AsyncClient, node: FakeNode) -> None:
    streamed = b'data: {"choices":[{"delta":{"tool_calls":[{}]}}]}\n\ndata: [DONE]\n\n'

    async def proxied(run: Run) -> None:
        if run.request.body.get("stream"):
            await run.respond(EVENTS, streamed)
        else:
            await run.respond("application/json", b'{"choices": [1]}')
        await run.close()

    await node.engine("own", proxied)
    asked = chat("own", response_format={"type": "json_object"}, tools=[{"type": "function"}], tool_choice="required")
    assert (await http.post("/v1/chat/completions", json=asked)).text == '{"choices": [1]}'
    assert (await http.post("/v1/chat/completions", json=asked | {"stream": True})).content == streamed
    assert 'gen_ai_client_token_usage_count{gen_ai_operation_name="chat"' in (await http.get("/metrics")).text


@pytest.mark.parametrize("status", [200, 503])
async def test_output_after_a_comment_is_an_event(node: FakeNode, serve: ServeFn, status: int) -> None:
    async with serve(waking_comment_after=0.1, waking_comment_interval=0.1) as gateway:
        await register(gateway, node)
        async with gateway.http.stream("POST", "/v1/messages", json=body(stream=True)) as answer:
            lines = answer.aiter_lines()
            assert (await anext(lines)).startswith(": waking own")

            async def late(run: Run) -> None:
                if status == 200:
                    await run.respond(EVENTS, b"event: ping\ndata: {}\n\ndata: [DONE]\n\n")
                else:
                    await run.respond("application/json", b'{"busy": 1}', status=status)
                await run.close()

            await node.engine("own", late)
            rest = "\n".join([line async for line in lines])
    if status == 200:
        written = [line for line in rest.splitlines() if line and not line.startswith(": waking")]
        assert written[:2] + written[3:] == ["event: ping", "data: {}", "data: [DONE]"]
        assert written[2].startswith(": timing queue;dur=")
    else:
        assert json.loads(rest.rsplit("data: ", 1)[1])["error"]["message"].endswith('503: {"busy": 1}')


async def test_idempotent_passthrough_is_generated_once_except_retryable_errors(http: httpx.AsyncClient, node: FakeNode) -> None:
    busy = True

    async def engine(run: Run) -> None:
        await run.respond("application/json" if busy else EVENTS, b"data: 1\n\n", status=503 if busy else 200)
        await run.close()

    asked = await node.engine("own", engine)
    key = {"idempotency-key": "k"}
    assert (await http.post("/v1/responses", json=body(stream=True), headers=key)).status_code == 503
    busy = False
    answers = [await http.post("/v1/responses", json=body(stream=True), headers=key) for _ in range(2)]
    assert [a.content for a in answers] == [b"data: 1\n\n"] * 2
    assert answers[1].headers["idempotent-replayed"] == "true"
    assert len(asked.requests) == 2


@pytest.mark.parametrize("key", [{}, {"idempotency-key": "k"}])
async def test_request_of_a_host_with_a_dead_engine_is_sent_again(
    http: httpx.AsyncClient, node: FakeNode, key: dict[str, str]
) -> None:
    async def breaks_once(run: Run) -> None:
        await run.respond("application/json", b'{"half":')
        if len(run.engine.requests) == 1:
            await run.fail(EngineFailed("it ended"), engine_lost=True)
        else:
            await run.data(b"1}")
            await run.close()

    engine = await node.engine("own", breaks_once)
    assert (await http.post("/v1/rerank", json=body(), headers=key)).text == '{"half":1}'
    assert len(engine.requests) == 2


async def test_repeated_engine_loss_reported_by_a_host_fails_the_request(http: httpx.AsyncClient, node: FakeNode) -> None:
    async def breaks(run: Run) -> None:
        await run.fail(EngineFailed("it ended"), engine_lost=True)

    engine = await node.engine("own", breaks)
    answer = await http.post("/v1/rerank", json=body())
    assert answer.status_code == 500
    assert answer.json()["error"]["message"].startswith("it ended (2 engines in a row died")
    assert answer.headers["x-should-retry"] == "false"
    assert len(engine.requests) == MAX_ENGINE_DEATHS


async def test_unsent_response_is_restarted_on_another_engine(http: httpx.AsyncClient, node: FakeNode) -> None:
    async def half(run: Run) -> None:
        await run.respond("application/json", b'{"half":')
        await run.cancelled.wait()

    async def all_of_it(run: Run) -> None:
        await run.respond("application/json", b"{}")
        await run.close()

    first = await node.engine("own", half)
    waiting = asyncio.create_task(http.post("/v1/rerank", json=body()))
    await first.until(lambda: len(first.requests) == 1)
    await first.vanish()
    first.state = InstanceState.FAILED
    await node.engine("own", all_of_it)
    assert (await waiting).text == "{}"


async def test_anthropic_clients_authenticate_by_x_api_key(serve: ServeFn, node: FakeNode) -> None:
    from services.gateway.authorization import hash_key

    async with serve(api_keys=hash_key("sk-a")) as gateway:
        assert (await gateway.http.get("/v1/models", headers={"x-api-key": "sk-a"})).status_code == 200
        refused = await gateway.http.post("/v1/messages", json=body(), headers={"x-api-key": "sk-b"})
        assert (refused.status_code, refused.json()["error"]["type"]) == (401, "authentication_error")
