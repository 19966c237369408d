"""One generation for one Idempotency-Key: at once, later, across gateways, and after the death of the one that began."""

from __future__ import annotations

import asyncio

from services.gateway.adapters import idempotency
from services.gateway.adapters.idempotency import Claim, IdempotencyStore, digest
from services.gateway.http.keys import Keys
from tests.integration.gateway.conftest import CARDS, Served, ServeFn, chat, until_listed
from tests.support.fake_engine import WORDS, FakeNode, Run

URL = "/v1/chat/completions"
TEXT = "".join(WORDS)
KEY = {"idempotency-key": "k-1"}


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


async def test_two_gateways_generate_once(gateway: Served, node: FakeNode, serve: ServeFn) -> None:
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


async def test_a_client_that_comes_back_gets_what_was_begun(gateway: Served, node: FakeNode) -> None:
    go = asyncio.Event()

    async def paused(run: Run) -> None:
        await run.start()
        await run.text("one ")
        await go.wait()
        await run.text("two")
        await run.finish(2)

    engine = await node.engine("alpha", paused)
    async with gateway.http.stream("POST", URL, json=chat(stream=True), headers=KEY) as answer:
        await anext(answer.aiter_lines())
    again = asyncio.create_task(gateway.http.post(URL, json=chat(stream=True), headers=KEY))
    go.set()
    text = (await again).text
    assert "one " in text
    assert "two" in text
    assert len(engine.requests) == 1
    assert engine.cancelled == []


async def test_a_failed_attempt_is_not_kept(gateway: Served, node: FakeNode) -> None:
    async def once_bad(run: Run) -> None:
        from shared.errors import EngineFailed
        from tests.support.fake_engine import speak

        if len(run.engine.requests) == 1:
            await run.fail(EngineFailed("bad luck"))
        else:
            await speak(run)

    await node.engine("alpha", once_bad)
    assert (await gateway.http.post(URL, json=chat(), headers=KEY)).status_code == 500
    assert (await gateway.http.post(URL, json=chat(), headers=KEY)).json()["choices"][0]["message"]["content"] == TEXT


async def test_a_dead_gateways_key_is_taken_over(gateway: Served, node: FakeNode) -> None:
    engine = await node.engine("alpha")
    request = gateway.http.build_request("POST", URL, json=chat(), headers=KEY)
    dead = IdempotencyStore(node.mesh, "dead", 3600.0)
    key = digest(Keys.of(None).encode(), URL.encode(), b"k-1")
    assert isinstance(await dead.claim(key, digest(request.content)), Claim)
    assert idempotency.LEASE_S > 2 * idempotency.RENEW_S
    answer = await gateway.http.send(request)
    assert answer.json()["choices"][0]["message"]["content"] == TEXT
    assert len(engine.requests) == 1
