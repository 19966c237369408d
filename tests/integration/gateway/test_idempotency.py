"""One Idempotency-Key causes one generation.

Repetitions are concurrent, later, at another gateway, or after the owner's death.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from nats.aio.msg import Msg
from nats.js.errors import NotFoundError
from nats.js.kv import KeyValue

from services.gateway.adapters import idempotency_store
from services.gateway.adapters.idempotency_store import IdempotencyStore
from shared.contracts import subjects
from shared.contracts.inference import InferRequest
from shared.contracts.node import InstanceState
from shared.errors import Conflict, EngineFailed
from shared.messaging.streams import catalog_bucket
from tests.integration.gateway.conftest import CARDS, Served, ServeFn, chat, until, until_listed
from tests.integration.gateway.gateway_process import answers, spawn
from tests.integration.gateway.idempotent_requests import (
    KEY,
    NAME,
    TEXT,
    URL,
    Paced,
    claimed,
    content,
    entry_of,
    hand_over,
    taken_over,
)
from tests.support.fake_engine import FakeEngine, FakeNode, Run, card_of, drain, speak
from tests.support.nats_accounts import NatsAccount


async def test_the_second_request_gets_the_firsts_answer(gateway: Served, node: FakeNode) -> None:
    engine = await node.engine("alpha")
    first = await gateway.http.post(URL, json=chat(), headers=KEY)
    second = await gateway.http.post(URL, json=chat(), headers=KEY)
    assert first.json() == second.json()
    assert "idempotent-replayed" not in first.headers
    assert second.headers["idempotent-replayed"] == "true"
    assert first.headers["x-request-id"] != second.headers["x-request-id"]
    assert len(engine.requests) == 1
    other = await gateway.http.post(URL, json=chat(seed=1), headers=KEY)
    assert (other.status_code, other.json()["error"]["code"]) == (422, "idempotency_key_reused")


async def test_readers_of_stored_responses_leave_no_consumers_in_nats(gateway: Served, node: FakeNode) -> None:
    """Readers of stored responses leave nothing in NATS.

    A stream has room for a thousand consumers: clients that repeat a request for minutes would
    exhaust it.
    """
    await node.engine("alpha")
    for _ in range(5):
        assert (await gateway.http.post(URL, json=chat(), headers=KEY)).status_code == 200
    js = node.mesh.nc.jetstream()

    async def gone() -> bool:
        streams = [await js.stream_info(name) for name in (f"KV_{subjects.IDEMPOTENCY_BUCKET}", subjects.KEYED_STREAM)]
        return [s.state.consumer_count for s in streams] == [0, 0]

    await until(gone, within=30)


async def test_two_gateways_generate_once_per_key(gateway: Served, node: FakeNode, serve: ServeFn) -> None:
    async with serve(waking_comment_after=0.2) as other:
        await until_listed(other, CARDS)
        first = asyncio.create_task(gateway.http.post(URL, json=chat(stream=True), headers=KEY))
        await node.until_demand(lambda: len(node.demand) > 0)
        async with other.http.stream("POST", URL, json=chat(stream=True), headers=KEY) as second:
            lines = second.aiter_lines()
            assert (await anext(lines)).startswith(": waiting for the first request")
            engine = await node.engine("alpha")
            rest = [line async for line in lines if line.startswith("data: ")]
        assert rest == [line for line in (await first).text.splitlines() if line.startswith("data: ")]
        assert rest[-1] == "data: [DONE]"
        assert len(engine.requests) == 1


async def test_a_failed_attempt_is_not_kept(gateway: Served, node: FakeNode) -> None:
    async def once_bad(run: Run) -> None:
        if len(run.engine.requests) == 1:
            await run.fail(EngineFailed("bad luck"))
        else:
            await speak(run)

    await node.engine("alpha", once_bad)
    assert (await gateway.http.post(URL, json=chat(), headers=KEY)).status_code == 500
    assert (await gateway.http.post(URL, json=chat(), headers=KEY)).json()["choices"][0]["message"]["content"] == TEXT


async def test_a_request_without_a_key_touches_no_stream(gateway: Served, node: FakeNode) -> None:
    await node.engine("alpha")
    assert (await gateway.http.post(URL, json=chat())).status_code == 200
    js = node.mesh.nc.jetstream()
    for stream in (subjects.KEYED_STREAM, f"KV_{subjects.IDEMPOTENCY_BUCKET}"):
        with pytest.raises(NotFoundError):
            await js.stream_info(stream)


async def test_a_refused_priority_does_not_claim_the_key(gateway: Served, node: FakeNode) -> None:
    await node.engine("alpha")
    refused = await gateway.http.post(URL, json=chat(), headers=KEY | {"x-thaw-priority": "urgent"})
    assert (refused.status_code, refused.json()["error"]["type"]) == (400, "invalid_request_error")
    with pytest.raises(NotFoundError):
        await node.mesh.nc.jetstream().stream_info(f"KV_{subjects.IDEMPOTENCY_BUCKET}")


async def test_repeated_stream_and_embedding_equal_the_first(gateway: Served, node: FakeNode) -> None:
    engine = await node.engine("alpha")
    first = await gateway.http.post(URL, json=chat(stream=True), headers=KEY)
    second = await gateway.http.post(URL, json=chat(stream=True), headers=KEY)
    assert first.text == second.text
    assert len(engine.requests) == 1
    vectors = await node.engine("vectors")
    ask = {"model": "vectors", "input": ["x", "y"]}
    embedded = [await gateway.http.post("/v1/embeddings", json=ask, headers=KEY) for _ in range(2)]
    assert embedded[0].json() == embedded[1].json()
    assert len(vectors.requests) == 1


async def test_response_over_the_message_limit_is_generated_once(gateway: Served, node: FakeNode) -> None:
    async def long(run: Run) -> None:
        await run.start()
        for _ in range(24):
            await run.text("x" * 500_000)
        await run.finish(24)

    engine = await node.engine("alpha", long)
    answers = [await gateway.http.post(URL, json=chat(), headers=KEY) for _ in range(2)]
    assert answers[0].json() == answers[1].json()
    assert len(answers[0].content) > 12_000_000
    assert len(engine.requests) == 1


async def test_a_killed_gateways_generation_is_joined(
    node: FakeNode, serve: ServeFn, own_nats: NatsAccount, new_port: Callable[[], int]
) -> None:
    paced = Paced()
    engine = await node.engine("alpha", paced)
    port = new_port()
    process = await spawn(THAW_NATS_URL=own_nats.url, THAW_GATEWAY_PORT=str(port))
    base = f"http://127.0.0.1:{port}"
    await until(lambda: answers(base, "/v1/models/alpha"), within=60)
    async with serve() as other:
        await until_listed(other, CARDS)
        async with other.http.stream("POST", f"{base}{URL}", json=chat(stream=True), headers=KEY) as broken:
            lines = broken.aiter_lines()
            while "one " not in await anext(lines):
                pass
            process.kill()
            await process.wait()
        again = asyncio.create_task(other.http.post(URL, json=chat(stream=True), headers=KEY))
        await until(lambda: taken_over(node))
        paced.go.set()
        answer = await again
        assert content(answer.text) == "one two"
        assert answer.headers["idempotent-replayed"] == "true"
        third = await other.http.post(URL, json=chat(stream=True), headers=KEY)
        assert third.text == answer.text
    assert len(engine.requests) == 1
    assert engine.cancelled == []


@pytest.mark.usefixtures("impatient")
async def test_gateway_that_died_while_queueing_is_replaced(gateway: Served, node: FakeNode) -> None:
    engine = await node.engine("alpha")
    request = gateway.http.build_request("POST", URL, json=chat(), headers=KEY)
    await claimed(node, request.content)
    answer = await gateway.http.send(request)
    assert answer.json()["choices"][0]["message"]["content"] == TEXT
    assert len(engine.requests) == 1


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("sent", [False, True])
async def test_recorded_attempt_without_confirmation_is_sent_again(gateway: Served, node: FakeNode, sent: bool) -> None:
    queued = asyncio.Event()

    async def late(run: Run) -> None:
        if sent and len(run.engine.requests) > 1:
            await run.fail(Conflict("it is running here already"))
            queued.set()
            return
        if sent:
            await queued.wait()
        await speak(run)

    engine = await node.engine("alpha", late)
    request = gateway.http.build_request("POST", URL, json=chat(), headers=KEY)
    claim = await claimed(node, request.content)
    reply = subjects.keyed_reply("dead", "r-1")
    await claim.record_attempt(reply, "r-1", engine.id, node.name)
    if sent:
        ask = InferRequest(request_id="r-1", instance_id=engine.id, model="alpha", endpoint="chat", body=chat())
        await node.mesh.nc.publish(subjects.infer(engine.id), ask.model_dump_json().encode(), reply=reply)
    answer = await gateway.http.send(request)
    assert answer.json()["choices"][0]["message"]["content"] == TEXT
    assert answer.json()["id"] == "chatcmpl-dead"
    assert [r.request.request_id for r in engine.requests] == ["r-1"] * (2 if sent else 1)


@pytest.mark.usefixtures("impatient")
async def test_recorded_attempt_on_a_vanished_engine_is_restarted(gateway: Served, node: FakeNode) -> None:
    engine = await node.engine("alpha")
    request = gateway.http.build_request("POST", URL, json=chat(), headers=KEY)
    claim = await claimed(node, request.content)
    await claim.record_attempt(subjects.keyed_reply("dead", "r-1"), "r-1", "0" * 32, "nowhere")
    answer = await gateway.http.send(request)
    assert answer.json()["choices"][0]["message"]["content"] == TEXT
    assert len(engine.requests) == 1


@pytest.mark.usefixtures("impatient")
async def test_stopped_gateway_hands_its_generation_over(node: FakeNode, serve: ServeFn) -> None:
    engine = await hand_over(node, serve)
    assert len(engine.requests) == 1
    assert engine.cancelled == []


async def test_a_disconnect_cancels_a_request_without_other_waiters(gateway: Served, node: FakeNode) -> None:
    engine = await node.engine("alpha", Paced())
    async with gateway.http.stream("POST", URL, json=chat(stream=True), headers=KEY) as answer:
        await anext(answer.aiter_lines())
    await engine.until(lambda: len(engine.cancelled) == 1)
    engine.behaviour = speak
    again = await gateway.http.post(URL, json=chat(stream=True), headers=KEY)
    assert content(again.text) == TEXT
    assert len(engine.requests) == 2


async def test_disconnect_of_one_client_does_not_end_a_shared_generation(gateway: Served, node: FakeNode, serve: ServeFn) -> None:
    paced = Paced()
    engine = await node.engine("alpha", paced)
    async with serve() as other:
        await until_listed(other, CARDS)
        async with gateway.http.stream("POST", URL, json=chat(stream=True), headers=KEY) as first:
            lines = first.aiter_lines()  # keeps a reference: the connection closes with the iterator
            await anext(lines)
            second = asyncio.create_task(other.http.post(URL, json=chat(stream=True), headers=KEY))
            await until(lambda: _waited_for(node))
        paced.go.set()
        assert content((await second).text) == "one two"
    assert len(engine.requests) == 1
    assert engine.cancelled == []


async def test_disconnect_of_the_last_client_ends_the_generation(gateway: Served, node: FakeNode) -> None:
    engine = await node.engine("alpha", Paced())
    async with gateway.http.stream("POST", URL, json=chat(stream=True), headers=KEY) as first:
        lines = first.aiter_lines()  # keeps a reference: the connection closes with the iterator
        await anext(lines)
        second = asyncio.create_task(gateway.http.post(URL, json=chat(stream=True), headers=KEY))
        await until(lambda: _waited_for(node))
    await asyncio.sleep(0)
    assert engine.cancelled == []
    second.cancel()
    await engine.until(lambda: len(engine.cancelled) == 1)


async def _waited_for(node: FakeNode) -> bool:
    return await IdempotencyStore(node.mesh, "test", 3600.0, 2**24).has_waiters(NAME)


async def test_a_waiter_whose_gateway_is_slow_to_reply_waits(node: FakeNode, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idempotency_store, "_WAITERS_TIMEOUT_S", 0.5)

    async def ignore(_: Msg) -> None:
        """Reply to nothing, as a gateway that waits for a processor."""

    await node.mesh.nc.subscribe(subjects.keyed_waiters(NAME), cb=ignore)
    await node.mesh.flush()
    store = IdempotencyStore(node.mesh, "test", 3600.0, 2**24)
    assert await store.has_waiters(NAME)
    assert not await store.has_waiters("another")


async def test_followers_receive_the_failure_without_a_retry(gateway: Served, node: FakeNode) -> None:
    go = asyncio.Event()

    async def unlucky(run: Run) -> None:
        await run.start()
        await go.wait()
        await run.fail(EngineFailed("bad luck"))

    engine = await node.engine("alpha", unlucky)
    first = asyncio.create_task(gateway.http.post(URL, json=chat(), headers=KEY))
    await engine.until(lambda: len(engine.requests) == 1)
    second = asyncio.create_task(gateway.http.post(URL, json=chat(), headers=KEY))
    await until(lambda: _waited_for(node))
    go.set()
    assert [(await a).status_code for a in (first, second)] == [500, 500]


async def test_follower_whose_owner_never_finishes_gets_504(gateway: Served, node: FakeNode) -> None:
    """The owner renews its claim, and its request never ends."""
    brief = card_of("brief", queue={"max_waiting": 8, "timeout": 0.2}, response_timeout=0.3)
    bucket = await catalog_bucket(node.mesh.nc.jetstream())
    await bucket.put(subjects.token("brief"), brief.model_dump_json().encode())
    await until_listed(gateway, (*CARDS, brief))
    request = gateway.http.build_request("POST", URL, json=chat("brief"), headers=KEY)
    async with (await claimed(node, request.content)).renewed():
        answer = await gateway.http.send(request)
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline_exceeded")


async def test_followers_survive_a_draining_engine(gateway: Served, node: FakeNode, serve: ServeFn) -> None:
    go = asyncio.Event()

    async def draining(run: Run) -> None:
        await go.wait()
        await drain(run)

    async with serve() as other:
        await until_listed(other, CARDS)
        leaving = await node.engine("alpha", draining)
        tasks = [asyncio.create_task(gateway.http.post(URL, json=chat(), headers=KEY))]
        await leaving.until(lambda: len(leaving.requests) == 1)
        tasks.append(asyncio.create_task(other.http.post(URL, json=chat(), headers=KEY)))
        await until(lambda: _waited_for(node))
        leaving.state = InstanceState.DRAINING
        engine = await node.engine("alpha")
        go.set()
        answers = [(await t).json() for t in tasks]
    assert answers[0] == answers[1]
    assert answers[0]["choices"][0]["message"]["content"] == TEXT
    assert len(engine.requests) == 1


async def test_an_expired_response_is_generated_again(gateway: Served, node: FakeNode) -> None:
    engine = await node.engine("alpha")
    assert (await gateway.http.post(URL, json=chat(), headers=KEY)).status_code == 200
    await until(lambda: _done(node))
    await node.mesh.nc.jetstream().purge_stream(subjects.KEYED_STREAM)
    again = await gateway.http.post(URL, json=chat(), headers=KEY)
    assert again.json()["choices"][0]["message"]["content"] == TEXT
    assert "idempotent-replayed" not in again.headers
    assert len(engine.requests) == 2


async def _done(node: FakeNode) -> bool:
    entry = await entry_of(node)
    return entry is not None and entry.state == "done"


@pytest.mark.usefixtures("impatient")
async def test_owner_whose_claim_was_taken_over_answers_503(gateway: Served, node: FakeNode) -> None:
    engine: FakeEngine = await node.engine("alpha", Paced())
    first = asyncio.create_task(gateway.http.post(URL, json=chat(), headers=KEY))
    await engine.until(lambda: len(engine.requests) == 1)
    bucket = await node.mesh.nc.jetstream().key_value(subjects.IDEMPOTENCY_BUCKET)
    entry = await entry_of(node)
    assert entry is not None
    usurped = entry.model_copy(update={"owner": "other:1"})
    await bucket.put(NAME, usurped.model_dump_json().encode())
    answer = await first
    assert (answer.status_code, answer.headers["x-should-retry"]) == (503, "true")
    assert engine.cancelled == []


class Away:
    """A store method that fails as the NATS client does while its server is stopped."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, method: str, times: int) -> None:
        self.left = times
        original = getattr(KeyValue, method)

        async def failing(*given: Any, **named: Any) -> Any:
            if self.left > 0:
                self.left -= 1
                raise TimeoutError
            return await original(*given, **named)

        monkeypatch.setattr(KeyValue, method, failing)

    async def over(self) -> bool:
        return self.left == 0


async def test_a_follower_outlives_an_outage_of_the_store(gateway: Served, node: FakeNode, monkeypatch: pytest.MonkeyPatch) -> None:
    """A follower outlives an outage of the store.

    Chaos seed 1: while NATS was stopped, a repetition in progress ended with
    `the store of idempotency keys cannot be reached`.
    """
    behaviour = Paced()
    engine = await node.engine("alpha", behaviour)
    first = asyncio.create_task(gateway.http.post(URL, json=chat(stream=True), headers=KEY))
    await engine.until(lambda: len(engine.requests) == 1)
    away = Away(monkeypatch, "watch", 2)
    second = asyncio.create_task(gateway.http.post(URL, json=chat(stream=True), headers=KEY))
    await until(away.over)
    behaviour.go.set()
    assert content((await second).text) == content((await first).text) == "one two"
    assert len(engine.requests) == 1


@pytest.mark.parametrize("method", ["create", "update"])
async def test_an_owner_outlives_an_outage_of_the_store(
    gateway: Served, node: FakeNode, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """An owner outlives an outage of the store.

    A NATS restart ends no request that claims its key, or records its instance.
    """
    engine = await node.engine("alpha")
    away = Away(monkeypatch, method, 2)
    answer = await gateway.http.post(URL, json=chat(), headers=KEY)
    assert (away.left, answer.status_code) == (0, 200)
    again = await gateway.http.post(URL, json=chat(), headers=KEY)
    assert again.json() == answer.json()
    assert len(engine.requests) == 1


async def test_claim_whose_confirmation_was_lost_is_kept(gateway: Served, node: FakeNode, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = await node.engine("alpha")
    create, calls = KeyValue.create, 0

    async def unconfirmed(self: KeyValue, *given: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        found = await create(self, *given, **named)
        if calls == 1:
            raise TimeoutError
        return found

    monkeypatch.setattr(KeyValue, "create", unconfirmed)
    answer = await gateway.http.post(URL, json=chat(), headers=KEY)
    assert answer.status_code == 200
    assert "idempotent-replayed" not in answer.headers
    assert (calls, len(engine.requests)) == (2, 1)
