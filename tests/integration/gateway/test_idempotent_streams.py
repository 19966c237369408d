"""With an Idempotency-Key a client gets one response though its engine dies.

The response restarts before any output, resumes, or fails for good.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from shared.contracts.node import InstanceState
from shared.errors import EngineFailed
from tests.integration.gateway.conftest import Served, chat
from tests.integration.gateway.idempotent_requests import KEY, TEXT, URL, content
from tests.support.fake_engine import WORDS, FakeEngine, FakeNode, Run, speak


async def dies(engine: FakeEngine, node: FakeNode) -> None:
    """Die as after SIGKILL: stay silent until the node reports the exit."""
    await engine.vanish()
    engine.state = InstanceState.FAILED
    await node.announce()


def says(*words: str) -> Any:
    """Engine behaviour: send these words, then nothing."""

    async def half(run: Run) -> None:
        await run.start(fixed="no other engine can resume it")
        await run.text(*words)
        await run.cancelled.wait()

    return half


async def begun(gateway: Served, engine: FakeEngine, node: FakeNode, then: Any, **fields: Any) -> tuple[str, FakeEngine]:
    """Start a stream with a key; its engine dies after the first tokens.

    Returns:
        The client's text, and the next engine.
    """
    text = ""
    async with gateway.http.stream("POST", URL, json=chat(stream=True, **fields), headers=KEY) as answer:
        async for part in answer.aiter_text():
            text += part
            if engine.state is InstanceState.READY and content(text):
                await dies(engine, node)
                other = await node.engine("alpha", then)
    return text, other


@pytest.mark.parametrize("key", [KEY, {}])
async def test_complete_response_is_regenerated_after_an_engine_death(gateway: Served, node: FakeNode, key: dict[str, str]) -> None:
    engine = await node.engine("alpha", says("once upon"))
    waiting = asyncio.create_task(gateway.http.post(URL, json=chat(), headers=key))
    await engine.until(lambda: len(engine.requests) == 1)
    await dies(engine, node)
    other = await node.engine("alpha")
    answer = (await waiting).json()
    assert answer["choices"][0]["message"]["content"] == TEXT
    if key:
        assert (await gateway.http.post(URL, json=chat(), headers=key)).json() == answer
    assert len(other.requests) == 1


async def test_stream_resumes_where_its_engine_died(gateway: Served, node: FakeNode) -> None:
    engine = await node.engine("alpha", says(*WORDS[:2]))
    text, other = await begun(gateway, engine, node, speak)
    assert content(text) == TEXT
    assert text.endswith("data: [DONE]\n\n")
    assert text.count('"role":"assistant"') == text.count('"finish_reason":"stop"') == 1
    seeds = [json.loads(e.requests[0].request.model_dump_json())["body"]["seed"] for e in (engine, other)]
    assert seeds[0] == seeds[1]
    again = await gateway.http.post(URL, json=chat(stream=True), headers=KEY)
    assert content(again.text) == TEXT
    assert len(other.requests) == 1


async def test_a_follower_in_between_resumes_too(gateway: Served, node: FakeNode) -> None:
    engine = await node.engine("alpha", says(*WORDS[:2]))
    second = asyncio.create_task(_when_running(gateway, engine))
    text, _ = await begun(gateway, engine, node, speak)
    assert content(text) == content((await second).text) == TEXT


async def _when_running(gateway: Served, engine: FakeEngine) -> httpx.Response:
    await engine.until(lambda: len(engine.requests) == 1)
    return await gateway.http.post(URL, json=chat(stream=True), headers=KEY)


async def test_a_diverging_stream_breaks_off_for_good(gateway: Served, node: FakeNode) -> None:
    engine = await node.engine("alpha", says(*WORDS[:2]))
    text, other = await begun(gateway, engine, node, says("quite another"))
    assert content_of_events(text)[:2] == list(WORDS[:2])
    assert "cannot be resumed" in errors(text)[0]
    again = await gateway.http.post(URL, json=chat(stream=True), headers=KEY)
    assert errors(again.text) == errors(text)
    assert len(other.requests) == 1


async def test_stream_that_cannot_be_compared_fails_for_good(gateway: Served, node: FakeNode) -> None:
    engine = await node.engine("alpha", says(*WORDS[:2]))
    text, other = await begun(gateway, engine, node, speak, logprobs=True)
    assert errors(text)
    again = await gateway.http.post(URL, json=chat(stream=True, logprobs=True), headers=KEY)
    assert again.headers["idempotent-replayed"] == "true"
    assert events(again.text) == events(text)
    assert other.requests == []


async def test_stream_failed_by_its_engine_stays_failed(gateway: Served, node: FakeNode) -> None:
    go = asyncio.Event()

    async def fails(run: Run) -> None:
        await run.start()
        await run.text(WORDS[0])
        await go.wait()
        await run.fail(EngineFailed("bad luck"))

    engine = await node.engine("alpha", fails)
    async with gateway.http.stream("POST", URL, json=chat(stream=True), headers=KEY) as answer:
        text = ""
        async for part in answer.aiter_text():
            text += part
            go.set()
    again = await gateway.http.post(URL, json=chat(stream=True), headers=KEY)
    assert errors(text) == errors(again.text) == ["bad luck"]
    assert len(engine.requests) == 1


async def test_broken_stream_without_a_key_ends_with_an_error(gateway: Served, node: FakeNode) -> None:
    engine = await node.engine("alpha", says(*WORDS[:2]))
    text = ""
    async with gateway.http.stream("POST", URL, json=chat(stream=True)) as answer:
        async for part in answer.aiter_text():
            text += part
            if engine.state is InstanceState.READY and content_of_events(text):
                await dies(engine, node)
    assert "stopped before its response was complete" in errors(text)[0]
    assert "seed" not in engine.requests[0].request.body


def events(text: str) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]


def content_of_events(text: str) -> list[str]:
    return [c for e in events(text) if e.get("choices") and (c := e["choices"][0]["delta"].get("content"))]


def errors(text: str) -> list[str]:
    return [e["error"]["message"] for e in events(text) if "error" in e]
