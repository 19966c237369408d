"""A response with an Idempotency-Key counts once, whichever gateways are lost or follow it."""

from __future__ import annotations

import asyncio

import pytest

from shared.contracts import subjects
from shared.contracts.inference import InferRequest
from tests.integration.gateway.conftest import CARDS, Served, ServeFn, chat, until, until_listed
from tests.integration.gateway.idempotent_requests import KEY, TEXT, URL, Paced, claimed, content, ended, entry_of, hand_over
from tests.integration.gateway.usage_ledger import Ledger
from tests.support.fake_engine import FakeNode

TOKENS = 2
"""Tokens of each response of `Paced`."""


async def test_response_with_followers_and_repetitions_counts_once(
    gateway: Served, node: FakeNode, serve: ServeFn, ledger: Ledger
) -> None:
    paced = Paced()
    engine = await node.engine("alpha", paced)
    async with serve() as other:
        await until_listed(other, CARDS)
        waiting = [asyncio.create_task(gateway.http.post(URL, json=chat(), headers=KEY))]
        await engine.until(lambda: len(engine.requests) == 1)
        waiting += [asyncio.create_task(served.http.post(URL, json=chat(), headers=KEY)) for served in (gateway, other)]
        paced.go.set()
        answers = [await task for task in waiting]
        answers.append(await other.http.post(URL, json=chat(), headers=KEY))
    assert len({answer.json()["id"] for answer in answers}) == 1
    await until(lambda: ledger.counted(1))
    assert (ledger.tokens, ledger.failed) == (TOKENS, 0)


@pytest.mark.usefixtures("impatient")
async def test_response_whose_owner_was_lost_before_its_end_counts_where_it_was_followed(
    gateway: Served, node: FakeNode, ledger: Ledger
) -> None:
    """The follower has the whole response before it can know that the owner is gone."""
    engine = await node.engine("alpha")
    request = gateway.http.build_request("POST", URL, json=chat(), headers=KEY)
    claim = await claimed(node, request.content)
    reply = subjects.keyed_reply("dead", "r-1")
    await claim.record_attempt(reply, "r-1", engine.id, node.name)
    ask = InferRequest(request_id="r-1", instance_id=engine.id, model="alpha", endpoint="chat", body=chat())
    await node.mesh.nc.publish(subjects.infer(engine.id), ask.model_dump_json().encode(), reply=reply)
    answer = await gateway.http.send(request)
    assert answer.json()["choices"][0]["message"]["content"] == TEXT
    await until(lambda: ledger.counted(1))
    assert ledger.alone == ["chatcmpl-dead"]
    assert (ledger.tokens, ledger.failed) == (answer.json()["usage"]["completion_tokens"], 0)
    await until(lambda: ended(node))
    assert len(engine.requests) == 1


@pytest.mark.usefixtures("impatient")
async def test_response_of_a_stopped_gateway_counts_where_it_is_continued(node: FakeNode, serve: ServeFn, ledger: Ledger) -> None:
    engine = await hand_over(node, serve)
    await until(lambda: ledger.counted(1))
    assert (ledger.tokens, ledger.failed) == (TOKENS, 0)
    assert len(engine.requests) == 1


@pytest.mark.usefixtures("impatient")
async def test_owner_that_lost_its_key_leaves_the_count_to_the_new_one(gateway: Served, node: FakeNode, ledger: Ledger) -> None:
    engine = await node.engine("alpha", Paced())
    first = asyncio.create_task(gateway.http.post(URL, json=chat(), headers=KEY))
    await engine.until(lambda: len(engine.requests) == 1)
    bucket = await node.mesh.nc.jetstream().key_value(subjects.IDEMPOTENCY_BUCKET)
    entry = await entry_of(node)
    assert entry is not None
    name = (await bucket.keys())[0]
    await bucket.put(name, entry.model_copy(update={"owner": "other:1"}).model_dump_json().encode())
    assert (await first).status_code == 503
    await node.engine("beta")
    assert (await gateway.http.post(URL, json=chat(model="beta"))).status_code == 200
    await until(lambda: ledger.counted(1))
    assert [row.model for row in ledger.rows] == ["beta"]


async def test_failed_response_counts_once_and_its_repetition_again(gateway: Served, node: FakeNode, ledger: Ledger) -> None:
    """A client leaves, so that its key is deleted; the repetition is another generation."""
    engine = await node.engine("alpha", Paced())
    async with gateway.http.stream("POST", URL, json=chat(stream=True), headers=KEY) as answer:
        await anext(answer.aiter_lines())
    await engine.until(lambda: len(engine.cancelled) == 1)
    await until(lambda: ledger.counted(1))
    assert ledger.failed == 1
    paced = Paced()
    paced.go.set()
    engine.behaviour = paced
    assert content((await gateway.http.post(URL, json=chat(stream=True), headers=KEY)).text) == "one two"
    await until(lambda: ledger.counted(2))
    assert ledger.failed == 1
