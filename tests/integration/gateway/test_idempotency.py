"""One Idempotency-Key causes one generation.

Repetitions are concurrent, later, at another gateway, or after the owner's death.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from nats.aio.msg import Msg
from nats.js.errors import NotFoundError
from nats.js.kv import KeyValue

from services.gateway.adapters import idempotency_store
from services.gateway.adapters.idempotency_store import Claim, Entry, IdempotencyStore, digest
from services.gateway.authorization import Authorizer
from services.gateway.idempotency import abandoned, idempotent_request
from shared.contracts import subjects
from shared.contracts.inference import InferRequest
from shared.contracts.node import InstanceState
from shared.errors import Conflict, EngineFailed
from shared.messaging.streams import catalog_bucket
from shared.ports import free_port
from tests.integration.gateway.conftest import CARDS, Served, ServeFn, chat, until, until_listed
from tests.integration.gateway.test_process import answers, spawn
from tests.support.fake_engine import WORDS, FakeEngine, FakeNode, Run, card_of, drain, speak
from tests.support.nats_accounts import NatsAccount

URL = "/v1/chat/completions"
TEXT = "".join(WORDS)
KEY = {"idempotency-key": "k-1"}
NAME = digest(Authorizer.key_hash({}).encode(), URL.encode(), b"k-1")


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


class Paced:
    """Engine behaviour: one word, then the rest when `go` is set.

    It refuses two concurrent attempts at one request.
    """

    def __init__(self, rest: str = "two") -> None:
        self.go = asyncio.Event()
        self.rest = rest
        self._at: set[str] = set()

    async def __call__(self, run: Run) -> None:
        name = run.request.request_id
        if name in self._at:
            await run.fail(Conflict("it is running here already"))
            return
        self._at.add(name)
        await run.start()
        await run.text("one ")
        going, leaving = asyncio.create_task(self.go.wait()), asyncio.create_task(run.cancelled.wait())
        await asyncio.wait([going, leaving], return_when=asyncio.FIRST_COMPLETED)
        for task in (going, leaving):
            task.cancel()
        if not run.cancelled.is_set():
            await run.text(self.rest)
            await run.finish(2)


def content(text: str) -> str:
    """Return the concatenated content of a stream."""
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    return "".join(e["choices"][0]["delta"].get("content") or "" for e in events)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use leases of one second instead of five."""
    for module in (idempotent_request, abandoned):
        monkeypatch.setattr(module, "LEASE_S", 1.0)
    monkeypatch.setattr(idempotency_store, "RENEW_S", 0.25)
    monkeypatch.setattr(idempotent_request, "RENEW_S", 0.25)


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


async def test_a_killed_gateways_generation_is_joined(node: FakeNode, serve: ServeFn, own_nats: NatsAccount) -> None:
    paced = Paced()
    engine = await node.engine("alpha", paced)
    port = free_port()
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


async def entry_of(node: FakeNode) -> Entry | None:
    bucket = await node.mesh.nc.jetstream().key_value(subjects.IDEMPOTENCY_BUCKET)
    value = (await bucket.get(NAME)).value
    return Entry.model_validate_json(value) if value else None


async def taken_over(node: FakeNode) -> bool:
    """True if the key's owner is another gateway than the engine responds to."""
    entry = await entry_of(node)
    return entry is not None and entry.owner.split(":")[0] != entry.reply.split(".")[-2]


async def claimed(node: FakeNode, body: bytes) -> Claim:
    """Leave a key as a gateway does that dies."""
    dead = IdempotencyStore(node.mesh, "dead", 3600.0, 2**24)
    claim = await dead.claim_or_get(NAME, Entry(request=digest(body), answer_id="chatcmpl-dead", created=1))
    assert isinstance(claim, Claim)
    return claim


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


async def hand_over(node: FakeNode, serve: ServeFn) -> FakeEngine:
    """Stop a gateway during a generation, which another gateway continues; return the engine."""
    paced = Paced()
    engine = await node.engine("alpha", paced)
    async with serve(drain_timeout=0.2) as first, serve() as second:
        await until_listed(first, CARDS)
        await until_listed(second, CARDS)
        async with first.http.stream("POST", URL, json=chat(stream=True), headers=KEY) as broken:
            lines = broken.aiter_lines()
            await anext(lines)
            first.stop.set()
            assert "shutting_down" in [line async for line in lines if line][-1]
        again = asyncio.create_task(second.http.post(URL, json=chat(stream=True), headers=KEY))
        await until(lambda: taken_over(node))
        paced.go.set()
        assert content((await again).text) == "one two"
    return engine


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
