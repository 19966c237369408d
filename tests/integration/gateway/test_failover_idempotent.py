"""Failover with an Idempotency-Key: all clients read one response in parts."""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack

import httpx
import pytest
from nats.aio.msg import Msg

from services.gateway.adapters import engine_client, idempotency_store
from services.gateway.adapters.idempotency_store import Claim
from services.gateway.idempotency import abandoned, idempotent_request
from shared.contracts import subjects
from shared.contracts.node import InstanceState
from tests.integration.gateway.conftest import CARDS, Served, ServeFn, chat, until_listed
from tests.integration.gateway.failover import TEXT, URL, content_of, die, events, holding
from tests.support.fake_engine import FakeEngine, FakeNode
from tests.support.nats_accounts import NatsAccount
from tests.support.scripted_engine import Script, Teller

KEY = {"idempotency-key": "k"}
SCRIPT = Script((TEXT,))
BODY = chat(stream=True)


@pytest.fixture
def short_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the lease of a key and its renewal: a late renewal loses the key to a follower."""
    for module in (idempotent_request, abandoned):
        monkeypatch.setattr(module, "LEASE_S", 2.0)
    monkeypatch.setattr(idempotency_store, "RENEW_S", 0.2)
    monkeypatch.setattr(idempotent_request, "RENEW_S", 0.2)


async def ask(gateway: Served, engine: FakeEngine, tokens: int) -> asyncio.Task[httpx.Response]:
    """Start a stream with a key, and wait until its engine has sent that many tokens."""
    waiting = asyncio.create_task(gateway.http.post(URL, json=BODY, headers=KEY))
    await has_sent(engine, tokens)
    return waiting


async def has_sent(engine: FakeEngine, tokens: int) -> None:
    await engine.until(lambda: bool(engine.requests) and engine.requests[0].seq == tokens + 1)


@pytest.mark.parametrize("logprobs", [False, True])
async def test_all_clients_of_one_key_receive_the_parts_as_one_response(
    gateway: Served, node: FakeNode, serve: ServeFn, logprobs: bool
) -> None:
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
        assert [content_of(a.text) for a in answers] == [TEXT] * 3
        assert [a.headers.get("idempotent-replayed") for a in answers] == [None, "true", "true"]
        assert answers[2].content == answers[1].content
        assert len(third.requests) == 1


@pytest.mark.usefixtures("short_lease")
async def test_a_new_owner_resumes_from_the_parts(node: FakeNode, serve: ServeFn, own_nats: NatsAccount) -> None:
    """A new owner resumes from the recorded parts.

    The owner dies after one engine died, and then the second engine dies.
    """
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
        assert content_of(answer.text) == TEXT
        assert third.resumed == [14]


@pytest.mark.usefixtures("short_lease")
async def test_response_whose_parts_nats_lost_is_generated_again(
    node: FakeNode, serve: ServeFn, own_nats: NatsAccount, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A response whose parts NATS lost is generated again.

    NATS is killed after it delivered messages and before it stored them; then the owner dies, which
    alone has them.
    """

    async def killed(_: Claim) -> None:
        """Kill a gateway: it releases nothing."""

    monkeypatch.setattr(Claim, "release", killed)
    monkeypatch.setattr(idempotency_store, "_CAPTURE_TIMEOUT_S", 0.2)
    first = await node.engine("alpha", Teller(SCRIPT, holding(9)))
    async with serve() as other:
        await until_listed(other, CARDS)
        async with serve() as owner:
            await until_listed(owner, CARDS)
            cut = await ask(owner, first, 9)
            await die(node, first)
            second = await node.engine("alpha", Teller(SCRIPT, holding(5)))
            await second.until(lambda: bool(second.requests) and second.requests[0].seq == 6)
            await node.mesh.nc.jetstream().purge_stream(subjects.KEYED_STREAM)
        assert "shutting_down" in (await cut).text
        await die(node, second)
        third = Teller(SCRIPT)
        await node.engine("alpha", third)
        response = await other.http.post(URL, json=BODY, headers=KEY)
        assert content_of(response.text) == TEXT
        assert third.resumed == [], "from the beginning"


@pytest.fixture
def hard_of_hearing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drop a first attempt's messages to gateways after its ninth token.

    The stream still captures them, but only after the owner has read it.
    """
    take = engine_client.EngineClient._on_message

    async def listening(self: engine_client.EngineClient, message: Msg) -> None:
        if not (message.subject.endswith("-1") and message.data and json.loads(message.data)["seq"] > 9):
            await take(self, message)

    monkeypatch.setattr(engine_client.EngineClient, "_on_message", listening)
    read = idempotency_store.IdempotencyStore.stored_messages

    async def early(self: idempotency_store.IdempotencyStore, reply: str) -> list[bytes]:
        found = await read(self, reply)
        return found[:10] if reply.endswith("-1") else found

    monkeypatch.setattr(idempotency_store.IdempotencyStore, "stored_messages", early)


@pytest.mark.usefixtures("hard_of_hearing")
@pytest.mark.parametrize("logprobs", [False, True])
async def test_follower_ahead_of_the_owner_skips_repeated_output(
    gateway: Served, node: FakeNode, serve: ServeFn, logprobs: bool
) -> None:
    """A follower that read more than the owner skips the repeated output.

    The owner missed captured messages, and resumed from an earlier token.
    """
    script, body = Script((TEXT,), logprobs=logprobs), chat(stream=True, logprobs=logprobs)
    first = await node.engine("alpha", Teller(script, holding(12)))
    owner = asyncio.create_task(gateway.http.post(URL, json=body, headers=KEY))
    await first.until(lambda: bool(first.requests) and first.requests[0].seq == 13)
    teller = Teller(script)
    async with serve() as other:
        await until_listed(other, CARDS)
        async with other.http.stream("POST", URL, json=body, headers=KEY) as answer:
            got = ""
            async for line in answer.aiter_lines():
                got += line + "\n"
                if content_of(got) == "Grüße aus " and first.state is InstanceState.READY:
                    await die(node, first)
                    await node.engine("alpha", teller)
        assert teller.resumed == [9]
        assert content_of(got) == content_of((await owner).text) == TEXT
        again = await other.http.post(URL, json=body, headers=KEY)
        assert content_of(again.text) == TEXT
        assert sum(len(c["logprobs"]["content"]) for e in events(got) for c in e["choices"] if c.get("logprobs")) == (
            len(TEXT.encode()) if logprobs else 0
        )


@pytest.mark.usefixtures("hard_of_hearing", "short_lease")
async def test_follower_ahead_of_the_owner_takes_over_mid_response(node: FakeNode, serve: ServeFn) -> None:
    """A follower that read more takes over in the middle of a response.

    The next engine does not resume from output beyond the recorded part: all clients of the key
    read the same parts.
    """
    first = await node.engine("alpha", Teller(SCRIPT, holding(12)))
    third = Teller(SCRIPT)
    async with serve() as other, AsyncExitStack() as owning:
        owner = await owning.enter_async_context(serve())
        await until_listed(other, CARDS)
        await until_listed(owner, CARDS)
        gone = await ask(owner, first, 12)
        async with other.http.stream("POST", URL, json=BODY, headers=KEY) as answer:
            got = ""
            async for line in answer.aiter_lines():
                got += line + "\n"
                if content_of(got) == "Grüße aus " and first.state is InstanceState.READY:
                    await die(node, first)
                    second = await node.engine("alpha", Teller(SCRIPT, holding(1)))
                    await has_sent(second, 1)
                    await owning.aclose()
                    await node.engine("alpha", third)
                    await die(node, second)
        assert "shutting_down" in (await gone).text
        assert content_of(got) == TEXT
        assert third.resumed == [10]
        assert content_of((await other.http.post(URL, json=BODY, headers=KEY)).text) == TEXT
