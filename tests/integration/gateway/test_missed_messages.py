"""NATS stores messages that a response's owner missed, or loses messages that it received.

All clients of the Idempotency-Key get one response. It is not generated twice where the stored
messages suffice.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable

import httpx
import pytest
from nats.aio.msg import Msg
from pydantic import SecretStr

from services.gateway.adapters import engine_client, idempotency_store
from services.gateway.domain import failover
from shared.contracts import subjects
from tests.integration.gateway.conftest import CARDS, Served, ServeFn, chat, until, until_listed
from tests.integration.gateway.failover import TEXT, URL, content_of, die, holding
from tests.support.fake_engine import FakeEngine, FakeNode
from tests.support.nats_link import linked
from tests.support.scripted_engine import Script, Teller
from tests.support.servers import NatsServer

KEY = {"idempotency-key": "k"}
SCRIPT = Script((TEXT,))
BODY = chat(stream=True)
TOKENS = len(TEXT.encode())


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idempotency_store, "_CAPTURE_TIMEOUT_S", 0.3)


class Deafness:
    """Messages of first attempts that do not reach their gateway; the stream captures them."""

    def __init__(self) -> None:
        self.is_missed: Callable[[int], bool] = lambda number: False


@pytest.fixture(autouse=True)
def deafness(monkeypatch: pytest.MonkeyPatch) -> Deafness:
    """Hold the numbers to drop; before the gateway subscribes."""
    found, take = Deafness(), engine_client.EngineClient._on_message

    async def listening(self: engine_client.EngineClient, message: Msg) -> None:
        is_first = message.subject.endswith("-1") and bool(message.data)
        if not (is_first and found.is_missed(json.loads(message.data)["seq"])):
            await take(self, message)

    monkeypatch.setattr(engine_client.EngineClient, "_on_message", listening)
    return found


async def has_sent(engine: FakeEngine, tokens: int) -> None:
    """Wait until the engine's first request has that many tokens."""
    await engine.until(lambda: bool(engine.requests) and engine.requests[0].seq == tokens + 1)


async def lose(node: FakeNode, *numbers: int) -> None:
    """Delete messages of the first attempt from the stream, as if NATS had not stored them."""
    js = node.mesh.nc.jetstream()
    last = (await js.stream_info(subjects.KEYED_STREAM)).state.last_seq
    for stream_seq in range(1, last + 1):
        message = await js.get_msg(subjects.KEYED_STREAM, stream_seq)
        assert message.data is not None
        assert message.subject is not None
        if message.subject.endswith("-1") and json.loads(message.data)["seq"] in numbers:
            await js.delete_msg(subjects.KEYED_STREAM, stream_seq)


async def stored(node: FakeNode, messages: int) -> None:
    js = node.mesh.nc.jetstream()

    async def enough() -> bool:
        return (await js.stream_info(subjects.KEYED_STREAM)).state.messages >= messages

    await until(enough)


async def test_final_message_missed_by_the_owner_is_read_from_the_store(
    gateway: Served, node: FakeNode, deafness: Deafness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last messages are lost on their way to the owner; no later one shows the gap."""
    monkeypatch.setattr(failover, "PROBE_AFTER_S", 1.0)
    deafness.is_missed = lambda number: number > 9
    teller = Teller(SCRIPT)
    engine = await node.engine("alpha", teller)
    answer = await gateway.http.post(URL, json=BODY, headers=KEY)
    assert content_of(answer.text) == TEXT
    assert (len(engine.requests), teller.resumed) == (1, [])
    assert content_of((await gateway.http.post(URL, json=BODY, headers=KEY)).text) == TEXT


async def test_a_gap_is_filled_from_the_store(gateway: Served, node: FakeNode, deafness: Deafness) -> None:
    deafness.is_missed = lambda number: number in (5, 6, 7)
    teller = Teller(SCRIPT)
    engine = await node.engine("alpha", teller)
    answer = await gateway.http.post(URL, json=BODY, headers=KEY)
    assert content_of(answer.text) == TEXT
    assert (len(engine.requests), engine.cancelled, teller.resumed) == (1, [], [])


async def test_response_resumes_after_messages_the_owner_missed(gateway: Served, node: FakeNode, deafness: Deafness) -> None:
    deafness.is_missed = lambda number: number > 4
    first = await node.engine("alpha", Teller(SCRIPT, holding(9)))
    waiting = asyncio.create_task(gateway.http.post(URL, json=BODY, headers=KEY))
    await has_sent(first, 9)
    await die(node, first)
    second = Teller(SCRIPT)
    await node.engine("alpha", second)
    assert content_of((await waiting).text) == TEXT
    assert second.resumed == [9]


@pytest.mark.parametrize("lost", [(6, 7, 8, 9), (6, 7)], ids=["the last ones", "in the middle"])
@pytest.mark.parametrize("logprobs", [False, True])
async def test_response_resumes_after_its_last_stored_message(
    gateway: Served, node: FakeNode, serve: ServeFn, lost: tuple[int, ...], logprobs: bool
) -> None:
    """NATS delivers messages to the owner, and does not store them; then the engine dies."""
    script, body = Script((TEXT,), logprobs=logprobs), chat(stream=True, logprobs=logprobs)
    first = await node.engine("alpha", Teller(script, holding(9)))
    async with serve() as other:
        await until_listed(other, CARDS)
        owner = asyncio.create_task(gateway.http.post(URL, json=body, headers=KEY))
        await has_sent(first, 9)
        await stored(node, 10)
        await lose(node, *lost)
        follower = asyncio.create_task(other.http.post(URL, json=body, headers=KEY))
        await die(node, first)
        second = Teller(script)
        await node.engine("alpha", second)
        answers = [await owner, await follower, await other.http.post(URL, json=body, headers=KEY)]
    assert [content_of(a.text) for a in answers] == [TEXT] * 3
    assert second.resumed == [5], "started and five tokens are stored"
    assert second.made == TOKENS - 5


async def test_response_with_unrecorded_end_is_completed_by_the_next_request(
    gateway: Served, node: FakeNode, serve: ServeFn
) -> None:
    """NATS loses messages in the middle of a response that its owner receives to the end."""
    go = asyncio.Event()
    teller = Teller(SCRIPT, holding(TOKENS - 1, go))
    engine = await node.engine("alpha", teller)
    async with serve() as other:
        await until_listed(other, CARDS)
        owner = asyncio.create_task(gateway.http.post(URL, json=BODY, headers=KEY))
        await has_sent(engine, TOKENS - 1)
        await stored(node, TOKENS)
        await lose(node, 6, 7)
        follower = asyncio.create_task(other.http.post(URL, json=BODY, headers=KEY))
        go.set()
        answers = [await owner, await asyncio.wait_for(follower, 60), await other.http.post(URL, json=BODY, headers=KEY)]
    assert [content_of(a.text) for a in answers] == [TEXT] * 3
    assert len({next(iter(ids(a))) for a in answers}) == 1, "one response"
    assert teller.resumed == [5]


async def test_response_without_its_first_message_is_generated_again(gateway: Served, node: FakeNode) -> None:
    go = asyncio.Event()
    engine = await node.engine("alpha", Teller(SCRIPT, holding(TOKENS - 1, go)))
    owner = asyncio.create_task(gateway.http.post(URL, json=BODY, headers=KEY))
    await has_sent(engine, TOKENS - 1)
    await stored(node, TOKENS)
    await lose(node, 0)
    go.set()
    first = await owner
    assert content_of(first.text) == TEXT
    again = await gateway.http.post(URL, json=BODY, headers=KEY)
    assert content_of(again.text) == TEXT
    assert ids(again) == ids(first)
    assert [r.request.resume for r in engine.requests] == [None, None]


def ids(answer: httpx.Response) -> set[str]:
    return {json.loads(line[6:])["id"] for line in answer.text.splitlines() if line.startswith("data: {")}


@pytest.mark.own_nats_server
async def test_reconnected_gateway_reads_missed_messages(
    node: FakeNode, serve: ServeFn, own_nats: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine completes a response while the gateway has no connection to NATS."""
    for name in ("PROBE_AFTER_S", "IDLE_GRACE_S"):  # silence would find the messages, later
        monkeypatch.setattr(failover, name, 3600.0)
    go = asyncio.Event()
    teller = Teller(SCRIPT, holding(9, go))
    engine = await node.engine("alpha", teller)
    async with linked(own_nats) as link, serve(nats_url=SecretStr(link.url)) as gateway:
        await until_listed(gateway, CARDS)
        waiting = asyncio.create_task(gateway.http.post(URL, json=BODY, headers=KEY))
        await has_sent(engine, 9)
        await stored(node, 10)
        await link.cut()
        go.set()
        await stored(node, TOKENS + 2)
        await link.open()
        answer = await asyncio.wait_for(waiting, 60)
        assert content_of(answer.text) == TEXT
        assert (len(engine.requests), teller.resumed) == (1, [])
