"""With an Idempotency-Key: the answer's parts, said by several engines, are one answer for all who bring the key, and for whoever takes over."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from services.gateway.adapters import idempotency
from tests.integration.gateway.conftest import CARDS, Served, ServeFn, chat, until_listed
from tests.integration.gateway.test_failover import TEXT, URL, die, holding, said
from tests.support.fake_engine import FakeEngine, FakeNode
from tests.support.servers import NatsServer
from tests.support.telling import Script, Teller

KEY = {"idempotency-key": "k"}
SCRIPT = Script((TEXT,))
BODY = chat(stream=True)


async def ask(gateway: Served, engine: FakeEngine, tokens: int) -> asyncio.Task[httpx.Response]:
    """A keyed stream, once its engine has said so many tokens."""
    waiting = asyncio.create_task(gateway.http.post(URL, json=BODY, headers=KEY))
    await engine.until(lambda: bool(engine.requests) and engine.requests[0].seq == tokens + 1)
    return waiting


@pytest.mark.parametrize("logprobs", [False, True])
async def test_all_who_bring_the_key_get_the_parts_as_one(gateway: Served, node: FakeNode, serve: ServeFn, logprobs: bool) -> None:
    script = Script((TEXT,), logprobs=logprobs)
    body = chat(stream=True, logprobs=logprobs)
    first = await node.engine("alpha", Teller(script, holding(9)))
    owner = asyncio.create_task(gateway.http.post(URL, json=body, headers=KEY))
    await first.until(lambda: bool(first.requests) and first.requests[0].seq == 10)
    async with serve() as other:
        await until_listed(other, CARDS)
        follower = asyncio.create_task(other.http.post(URL, json=body, headers=KEY))
        await die(node, first)
        second = await node.engine("alpha", Teller(script, holding(5)))
        await second.until(lambda: bool(second.requests) and second.requests[0].seq == 6)
        await die(node, second)
        third = await node.engine("alpha", Teller(script))
        answers = [await owner, await follower, await other.http.post(URL, json=body, headers=KEY)]
        assert [said(a.text) for a in answers] == [TEXT] * 3
        assert [a.headers.get("idempotent-replayed") for a in answers] == [None, "true", "true"]
        assert answers[2].content == answers[1].content
        assert len(third.requests) == 1


async def test_a_gateway_that_takes_over_goes_on_from_the_parts(
    node: FakeNode, serve: ServeFn, own_nats: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The owner dies after one engine did, and then the other engine does."""
    monkeypatch.setattr(idempotency, "LEASE_S", 1.0)
    monkeypatch.setattr("services.gateway.keyed.LEASE_S", 1.0)
    first = await node.engine("alpha", Teller(SCRIPT, holding(9)))
    async with serve() as other:
        await until_listed(other, CARDS)
        async with serve() as owner:
            await until_listed(owner, CARDS)
            gone = await ask(owner, first, 9)
            await die(node, first)
            second = await node.engine("alpha", Teller(SCRIPT, holding(5)))
            await second.until(lambda: bool(second.requests) and second.requests[0].seq == 6)
        assert "shutting_down" in (await gone).text
        waiting = asyncio.create_task(other.http.post(URL, json=BODY, headers=KEY))
        await asyncio.sleep(0)
        third = Teller(SCRIPT)
        await node.engine("alpha", third)
        await die(node, second)
        answer = await waiting
        assert said(answer.text) == TEXT
        assert third.resumed == [14]
