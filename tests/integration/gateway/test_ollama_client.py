"""The real `ollama` client against a gateway."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from services.gateway.authorization import hash_key
from shared.errors import ContextLengthExceeded, EngineFailed
from tests.integration.gateway.clients import ollama_client
from tests.integration.gateway.conftest import Served, ServeFn
from tests.integration.gateway.hosted_models import register
from tests.support.fake_engine import WORDS, FakeNode, Run, speak

ollama = pytest.importorskip("ollama")
TEXT = "".join(WORDS)
HELLO = [{"role": "user", "content": "Hi"}]


@pytest.fixture
async def client(gateway: Served) -> AsyncIterator[Any]:
    client = ollama_client(gateway)
    yield client
    await client._client.aclose()


async def test_a_chat_streams_and_has_durations_and_counts(client: Any, node: FakeNode) -> None:
    engine = await node.engine("alpha")
    parts = [p async for p in await client.chat("alpha:latest", HELLO, stream=True, options={"seed": 3, "num_ctx": 99})]
    assert "".join(p.message.content for p in parts) == TEXT
    assert len(parts) == len(WORDS) + 1
    assert [p.done for p in parts] == [False] * len(WORDS) + [True]
    last = parts[-1]
    assert (last.model, last.done_reason, last.prompt_eval_count, last.eval_count) == ("alpha:latest", "stop", 7, len(WORDS))
    assert last.total_duration >= last.load_duration + last.prompt_eval_duration + last.eval_duration > 0
    asked = engine.requests[0].request.body
    assert (asked["model"], asked["seed"], "num_ctx" in asked) == ("alpha", 3, False)


async def test_a_chat_is_answered_whole(client: Any, node: FakeNode) -> None:
    await node.engine("alpha")
    answer = await client.chat("a", HELLO)
    assert (answer.message.role, answer.message.content, answer.done, answer.done_reason) == ("assistant", TEXT, True, "stop")
    assert (answer.prompt_eval_count, answer.eval_count) == (7, len(WORDS))
    assert answer.total_duration > 0


@pytest.mark.parametrize(("raw", "endpoint"), [(False, "chat"), (True, "completion")])
async def test_generation_is_a_chat_or_a_completion(client: Any, node: FakeNode, raw: bool, endpoint: str) -> None:
    engine = await node.engine("alpha")
    assert (await client.generate("alpha", "Hi", raw=raw)).response == TEXT
    parts = [p.response async for p in await client.generate("alpha", "Hi", raw=raw, stream=True)]
    assert parts == [*WORDS, ""]
    assert [r.request.endpoint for r in engine.requests] == [endpoint] * 2


async def test_a_request_without_a_prompt_wakes_the_model(client: Any, node: FakeNode) -> None:
    engine = await node.engine("alpha")
    for answer in (await client.chat("alpha"), await client.generate("alpha", keep_alive="10m")):
        assert (answer.done, answer.done_reason) == (True, "load")
    assert [r.request.body["max_tokens"] for r in engine.requests] == [1, 1]
    assert [p.done_reason async for p in await client.chat("alpha", stream=True)] == ["load"]
    with pytest.raises(ollama.ResponseError, match="thaw sleep alpha") as caught:
        await client.generate("alpha", keep_alive=0)
    assert caught.value.status_code == 400


async def test_embeddings(client: Any, node: FakeNode) -> None:
    engine = await node.engine("vectors")
    answer = await client.embed("vectors", ["x", "y"])
    assert answer.embeddings == [pytest.approx([0, 0.4472136, -0.8944272]), pytest.approx([2 / 3, 1 / 3, -2 / 3])]
    assert answer.prompt_eval_count == 7
    assert (await client.embeddings("vectors", "x")).embedding == [0.0, 0.5, -1.0]
    assert (await client.embed("vectors", [])).embeddings == []
    assert [r.request.body["input"] for r in engine.requests] == [["x", "y"], "x", "."]


async def test_models_are_listed_shown_and_seen_running(client: Any, gateway: Served, node: FakeNode) -> None:
    await node.engine("alpha")
    listed = {m.model: m for m in (await client.list()).models}
    assert listed.keys() == {"alpha", "beta", "hasty", "vectors"}
    assert listed["alpha"].size == 1000
    assert listed["alpha"].details.parameter_size == "1K"
    shown = await client.show("a:latest")
    assert (shown.modelinfo["general.architecture"], shown.modelinfo["fake.context_length"]) == ("fake", 2048)
    assert (shown.capabilities, (await client.show("vectors")).capabilities) == (["completion", "tools"], ["embedding"])
    [running] = (await client.ps()).models
    assert (running.name, running.context_length) == ("alpha", 2048)
    assert running.expires_at.tzinfo is not None
    version = (await gateway.http.get("/api/version")).json()["version"]
    assert tuple(map(int, version.split("."))) >= (0, 6, 0)
    assert (await gateway.http.head("/")).status_code == 200


async def test_errors_have_the_clients_form(client: Any, gateway: Served, node: FakeNode) -> None:
    async def refuse(run: Run) -> None:
        await run.start()
        await run.fail(ContextLengthExceeded("too long"))

    await node.engine("alpha", refuse)
    for call in (client.chat("alpha", HELLO), client.chat("alpha", HELLO, options={"temperature": 9})):
        with pytest.raises(ollama.ResponseError) as caught:
            await call
        assert caught.value.status_code == 400
    with pytest.raises(ollama.ResponseError, match="too long") as caught:
        await anext(await client.chat("alpha", HELLO, stream=True))
    assert caught.value.status_code == 400
    for call in (client.chat("unknown", HELLO), client.show("unknown"), client.embed("unknown", "x")):
        with pytest.raises(ollama.ResponseError, match="does not exist") as caught:
            await call
        assert caught.value.status_code == 404
    answer = await gateway.http.post("/api/chat", content=b"{", headers={"content-type": "application/json"})
    assert (answer.status_code, answer.json().keys()) == (400, {"error"})
    assert (await gateway.http.get("/api/chat")).json() == {"error": "Not allowed to GET on /api/chat"}
    assert (await gateway.http.get("/api/nothing")).json() == {"error": "Invalid URL (GET /api/nothing)"}


async def test_management_names_the_command(client: Any) -> None:
    for call in (client.create("x", from_="y"), client.copy("x", "y"), client.delete("x"), client.push("x")):
        with pytest.raises(ollama.ResponseError, match=r"thaw models|aliases|publishes no models"):
            await call


async def test_a_failure_in_a_stream_is_its_last_line(client: Any, node: FakeNode) -> None:
    read = asyncio.Event()

    async def broken(run: Run) -> None:
        await run.start()
        await run.text("Hello")
        await read.wait()
        await run.fail(EngineFailed("gone"))

    await node.engine("alpha", broken)
    stream = await client.chat("alpha", HELLO, stream=True)
    assert (await anext(stream)).message.content == "Hello"
    read.set()
    with pytest.raises(ollama.ResponseError, match="gone"):
        await anext(stream)


async def test_a_waiting_stream_receives_no_comments(node: FakeNode, serve: ServeFn) -> None:
    async with serve(waking_comment_after=0.05, waking_comment_interval=0.05) as gateway:
        client = ollama_client(gateway)

        async def late(run: Run) -> None:
            """Respond once the gateway would have sent a comment to a client of OpenAI's API."""
            async with gateway.http.stream(
                "POST", "/v1/chat/completions", json={"model": "beta", "messages": HELLO, "stream": True}
            ) as other:
                assert (await anext(other.aiter_text())).startswith(":")
            await speak(run)

        await node.engine("alpha", late)
        async with gateway.http.stream("POST", "/api/chat", json={"model": "alpha", "messages": HELLO}) as answer:
            assert answer.headers["content-type"] == "application/x-ndjson"
            assert "prefill;dur=" in answer.headers["server-timing"]
            parts = [json.loads(line) async for line in answer.aiter_lines()]
        assert "".join(p["message"]["content"] for p in parts) == TEXT
        await client._client.aclose()


async def test_keys_and_repeated_requests_hold_as_elsewhere(node: FakeNode, serve: ServeFn) -> None:
    engine = await node.engine("alpha")
    async with serve(api_keys=hash_key("sk-mine")) as gateway:
        stranger = ollama_client(gateway)
        for call in (stranger.list(), stranger.chat("alpha", HELLO), stranger.show("alpha"), stranger.ps()):
            with pytest.raises(ollama.ResponseError) as caught:
                await call
            assert caught.value.status_code == 401
        mine = ollama_client(gateway, headers={"Authorization": "Bearer sk-mine", "Idempotency-Key": "one"})
        first = [p.message.content async for p in await mine.chat("alpha", HELLO, stream=True)]
        again = [p.message.content async for p in await mine.chat("alpha", HELLO, stream=True)]
        assert "".join(first) == "".join(again) == TEXT
        assert len(engine.requests) == 1
        await stranger._client.aclose()
        await mine._client.aclose()


async def test_an_engines_own_http_is_translated(gateway: Served, node: FakeNode, client: Any) -> None:
    await register(gateway, node)

    async def own(run: Run) -> None:
        if run.request.body.get("stream"):
            chunk = {"choices": [{"index": 0, "delta": {"content": "né"}, "finish_reason": "stop"}]}
            usage = {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 1}}
            events = b"".join(b"data: " + json.dumps(e).encode() + b"\r\n\r\n" for e in (chunk, usage))
            await run.respond("text/event-stream", events[:20], events[20:] + b"data: [DONE]\r\n\r\n")
        elif "tools" in run.request.body:
            call = {"id": "c", "type": "function", "function": {"name": "now", "arguments": '{"zone": "UTC"}'}}
            message = {"role": "assistant", "content": None, "tool_calls": [call]}
            await run.respond(
                "application/json", json.dumps({"choices": [{"message": message, "finish_reason": "tool_calls"}]}).encode()
            )
        else:
            await run.respond("application/json", b'{"detail": "no"}', status=422)
        await run.close()

    await node.engine("own", own)
    parts = [p async for p in await client.chat("own", HELLO, stream=True)]
    assert [(p.message.content, p.done) for p in parts] == [("né", False), ("", True)]
    assert parts[-1].eval_count == 1
    answer = await client.chat("own", HELLO, tools=[{"type": "function", "function": {"name": "now"}}])
    [call] = answer.message.tool_calls
    assert (call.function.name, call.function.arguments) == ("now", {"zone": "UTC"})
    with pytest.raises(ollama.ResponseError, match="no") as caught:
        await client.chat("own", HELLO)
    assert caught.value.status_code == 422


async def test_large_images_are_parsed_in_the_worker_process(gateway: Served, node: FakeNode) -> None:
    await register(gateway, node)
    image = "iVBORw0KGgo" + "A" * 200_000

    async def see(run: Run) -> None:
        [_, part] = run.request.body["messages"][0]["content"]
        answer = {"choices": [{"message": {"content": str(len(part["image_url"]["url"]))}, "finish_reason": "stop"}]}
        await run.respond("application/json", json.dumps(answer).encode())
        await run.close()

    await node.engine("own", see)
    asked = {"model": "own", "stream": False, "messages": [{"role": "user", "content": "What?", "images": [image]}]}
    answer: httpx.Response = await gateway.http.post("/api/chat", json=asked)
    assert answer.json()["message"]["content"] == str(len("data:image/png;base64,") + len(image))
