"""An engine dies; its request resumes from its tokens, unnoticed by the client."""

from __future__ import annotations

import asyncio
import re

import pytest

from services.gateway.domain import failover
from tests.integration.gateway.conftest import Served, chat, until
from tests.integration.gateway.failover import TEXT, URL, content_of, die, events, holding
from tests.support.fake_engine import FakeNode, Run, hang
from tests.support.scripted_engine import Script, Teller


@pytest.mark.parametrize("stream", [True, False])
async def test_request_resumes_where_its_engine_died(gateway: Served, node: FakeNode, stream: bool) -> None:
    script = Script((TEXT,))
    first = await node.engine("alpha", Teller(script, holding(9)))
    body = chat(stream=stream, stream_options={"include_usage": True}) if stream else chat()
    waiting = asyncio.create_task(gateway.http.post(URL, json=body))
    await first.until(lambda: bool(first.requests) and first.requests[0].seq == 10)
    teller = Teller(script)
    await die(node, first)
    await node.engine("alpha", teller)
    answer = await waiting
    assert answer.status_code == 200
    assert teller.resumed == [9]
    assert teller.made == len(TEXT.encode()) - 9
    if stream:
        assert content_of(answer.text) == TEXT
        assert answer.text.endswith("data: [DONE]\n\n")
        assert {e["id"] for e in events(answer.text)} == {events(answer.text)[0]["id"]}
        usage = events(answer.text)[-1]["usage"]
    else:
        assert answer.json()["choices"][0]["message"]["content"] == TEXT
        usage = answer.json()["usage"]
    assert usage["completion_tokens"] == len(TEXT.encode())

    async def counted() -> bool:
        shown = (await gateway.http.get("/metrics")).text
        return all(
            re.search(rf'thaw_requests_{name}\{{.*thaw_kind="failover".*\}} 1.0', shown)
            for name in ("handed_over_total", "pause_seconds_count")
        )

    await until(counted)


async def test_lost_final_message_is_detected_while_the_engine_is_busy(
    gateway: Served, node: FakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lost end is detected though the engine is busy.

    The last messages are lost, and no later one shows the gap; the engine serves another request,
    and is never idle.
    """
    monkeypatch.setattr(failover, "PROBE_AFTER_S", 1.0)

    def fall_silent(run: Run, tokens: int) -> None:
        if tokens == 9 and run.request.resume is None:
            run.cancelled.set()

    teller = Teller(Script((TEXT,)), fall_silent)
    engine = await node.engine("alpha", hang)
    other = asyncio.create_task(gateway.http.post(URL, json=chat(stream=True)))
    await engine.until(lambda: bool(engine.requests) and engine.requests[0].seq == 2)
    engine.behaviour = teller
    answer = await gateway.http.post(URL, json=chat(stream=True))
    assert content_of(answer.text) == TEXT
    assert teller.resumed == [9]
    assert engine.cancelled == [engine.requests[1].request.request_id], "in case the request arrives there late"
    assert not other.done()
    other.cancel()
