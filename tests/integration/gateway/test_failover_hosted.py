"""Pass-through responses that report their tokens resume on another host.

The client sees one response head.
"""

from __future__ import annotations

import asyncio
import base64
import json
from typing import Any

import httpx
import pytest

from shared.contracts.inference import ChoiceDelta, InferData, InferEnd, InferResponse, Usage
from tests.integration.gateway.conftest import Served
from tests.integration.gateway.failover import die
from tests.integration.gateway.hosted_models import EVENTS, register
from tests.support.fake_engine import FakeNode, Run
from tests.support.scripted_engine import first_of

URL = "/v1/chat/completions"
WORDS = ("Grü", "ße ", "aus ", "日本")


@pytest.fixture
async def http(gateway: Served, node: FakeNode) -> httpx.AsyncClient:
    await register(gateway, node)
    return gateway.http


class Host:
    """A host that sends the words as chat events, or as one body.

    It holds before the word `until`.
    """

    def __init__(self, until: int | None = None, fixed: str = "", status: int = 200) -> None:
        self.until, self.fixed, self.status = until, fixed, status

    async def __call__(self, run: Run) -> None:
        resume, stream = run.request.resume, bool(run.request.body.get("stream"))
        there = resume.choices[0] if resume is not None else None
        at = len(there.token_ids) if there is not None else 0
        head: dict[str, Any] = resume.head if resume is not None else {"id": f"chatcmpl-{run.engine.id}"}
        kind = EVENTS if stream else "application/json"
        await run.say(
            InferResponse(status=self.status, content_type=kind, fixed=self.fixed, seed=5, prompt_tokens=7, resume_head=head)
        )
        for number in range(at, len(WORDS)):
            if number == self.until:
                await first_of(run.cancelled)
                return
            word = WORDS[number]
            event = json.dumps(head | {"choices": [{"index": 0, "delta": {"content": word}}]})
            data = base64.b64encode(f"data: {event}\n\n".encode() if stream else b"").decode()
            await run.say(InferData(seq=0, data=data, progress=(ChoiceDelta(text=word, token_ids=(number,)),)))
        text = "".join(WORDS) if not stream else "data: [DONE]\n\n"
        if not stream:
            assert there is None or there.text_chars == 0  # the gateway has forwarded none of it
            text = json.dumps(head | {"choices": [{"index": 0, "message": {"content": text}}]})
        await run.data(text.encode())
        await run.say(InferEnd(seq=0, usage=Usage(prompt_tokens=7, completion_tokens=len(WORDS))))


def body(stream: bool) -> dict[str, Any]:
    return {"model": "own", "messages": [{"role": "user", "content": "Hi"}], "stream": stream}


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("key", [{}, {"idempotency-key": "k"}])
async def test_a_response_resumes_on_another_host(
    http: httpx.AsyncClient, node: FakeNode, stream: bool, key: dict[str, str]
) -> None:
    first = await node.engine("own", Host(until=2))
    waiting = asyncio.create_task(http.post(URL, json=body(stream), headers=key))
    await first.until(lambda: bool(first.requests) and first.requests[0].seq == 3)
    await die(node, first)
    other = await node.engine("own", Host())
    answer = await waiting
    resume = other.requests[0].request.resume
    assert resume is not None
    assert (resume.choices[0].token_ids, resume.seed, resume.head) == ((0, 1), 5, {"id": f"chatcmpl-{first.id}"})
    assert resume.choices[0].text_chars == (len("".join(WORDS[:2])) if stream else 0)
    if stream:
        events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
        assert "".join(e["choices"][0]["delta"]["content"] for e in events) == "".join(WORDS)
        assert {e["id"] for e in events} == {f"chatcmpl-{first.id}"}
        assert answer.text.endswith("data: [DONE]\n\n")
    else:
        assert answer.json()["choices"][0]["message"]["content"] == "".join(WORDS)
    if key:
        again = await http.post(URL, json=body(stream), headers=key)
        assert again.content == answer.content


async def test_host_that_refuses_to_resume_is_not_used(http: httpx.AsyncClient, node: FakeNode) -> None:
    first = await node.engine("own", Host(until=2))
    waiting = asyncio.create_task(http.post(URL, json=body(True)))
    await first.until(lambda: bool(first.requests) and first.requests[0].seq == 3)
    await die(node, first)
    wrong = await node.engine("own", Host(status=400))
    await wrong.until(lambda: bool(wrong.requests))
    await die(node, wrong)
    await node.engine("own", Host())
    answer = await waiting
    assert answer.text.endswith("data: [DONE]\n\n")
    assert answer.text.count("data: {") == len(WORDS)
    assert answer.text.count(first.id) == len(WORDS)


async def test_response_that_only_its_host_can_resume_ends_with_an_error(http: httpx.AsyncClient, node: FakeNode) -> None:
    first = await node.engine("own", Host(until=2, fixed="it has tools"))
    waiting = asyncio.create_task(http.post(URL, json=body(True)))
    await first.until(lambda: bool(first.requests) and first.requests[0].seq == 3)
    await die(node, first)
    assert json.loads((await waiting).text.rsplit("data: ", 1)[1])["error"]["code"] == "engine_failed"
