"""Stored responses: continued at every gateway, bounded, and of one API key only."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest

from services.gateway.adapters import response_store
from shared.contracts import subjects
from tests.integration.gateway.clients import openai_client
from tests.integration.gateway.conftest import CARDS, Served, ServeFn, until_listed
from tests.support.fake_engine import WORDS, FakeNode

TEXT = "".join(WORDS)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a busy machine store responses as slowly as it does."""
    monkeypatch.setattr(response_store, "_STORE_TIMEOUT_S", 60.0)


async def create(gateway: Served, key: str = "none", **fields: Any) -> Any:
    async with openai_client(gateway, key) as client:
        made: Any = await client.responses.create(**({"model": "alpha", "input": "Hi"} | fields))
        return [event async for event in made][-1].response if fields.get("stream") else made


async def entries(node: FakeNode) -> list[str]:
    """Return the entries of the bucket that have a value, except the indexes."""
    bucket = await node.mesh.nc.jetstream().key_value(subjects.RESPONSES_BUCKET)
    return sorted(name.rpartition(".")[2] for name in await bucket.keys() if not name.endswith(".index"))


async def test_conversation_continues_at_another_gateway(gateway: Served, node: FakeNode, serve: ServeFn) -> None:
    engine = await node.engine("alpha")
    first = await create(gateway, instructions="of the first")
    assert first.store
    async with serve() as other:
        await until_listed(other, CARDS)
        last = await create(other, input="More", previous_response_id=first.id, instructions="New", stream=True)
        third = await create(other, input="Again", previous_response_id=last.id)
    assert last.previous_response_id == first.id
    messages = [(m["role"], m["content"]) for m in engine.requests[2].request.body["messages"]]
    assert messages == [("user", "Hi"), ("assistant", TEXT), ("user", "More"), ("assistant", TEXT), ("user", "Again")]
    assert engine.requests[1].request.body["messages"][0] == {"role": "system", "content": "New"}
    assert third.output_text == TEXT


async def test_stored_response_is_read_and_deleted(gateway: Served, node: FakeNode) -> None:
    await node.engine("alpha")
    first = await create(gateway, metadata={"k": "v"})
    second = await create(gateway, previous_response_id=first.id)
    async with openai_client(gateway) as client:
        assert await client.responses.retrieve(first.id) == first
        await client.responses.delete(first.id)
        for gone in (client.responses.retrieve(first.id), client.responses.delete(first.id)):
            with pytest.raises(openai.NotFoundError):
                await gone
        # A conversation does not depend on the responses before its last.
        await client.responses.create(model="alpha", input="More", previous_response_id=second.id)


async def test_another_key_gets_the_answer_for_an_unknown_response(gateway: Served, node: FakeNode) -> None:
    await node.engine("alpha")
    theirs, unknown = (await create(gateway, key="theirs")).id, f"resp_{'0' * 32}"
    async with openai_client(gateway, "mine") as client:
        for call in (client.responses.retrieve, client.responses.delete):
            texts = []
            for name in (theirs, unknown):
                with pytest.raises(openai.NotFoundError) as caught:
                    await call(name)
                texts.append(caught.value.message.replace(name, ""))
            assert texts[0] == texts[1]
        with pytest.raises(openai.NotFoundError) as caught:
            await client.responses.create(model="alpha", input="x", previous_response_id=theirs)
        assert caught.value.param == "previous_response_id"


@pytest.mark.parametrize("name", ["resp_x", "index", "a.index", "*", ">", "resp_" + "0" * 31 + "*"])
async def test_malformed_id_is_not_found(gateway: Served, name: str) -> None:
    assert (await gateway.http.get(f"/v1/responses/{name}")).status_code == 404


async def test_response_that_is_not_to_be_stored_is_not(gateway: Served, node: FakeNode) -> None:
    await node.engine("alpha")
    response = await create(gateway, store=False)
    assert not response.store
    assert (await gateway.http.get(f"/v1/responses/{response.id}")).status_code == 404


async def test_bounds_hold_under_concurrent_requests_at_two_gateways(node: FakeNode, serve: ServeFn) -> None:
    await node.engine("alpha")
    async with serve(responses_per_key=3) as one, serve(responses_per_key=3) as two:
        for gateway in (one, two):
            await until_listed(gateway, CARDS)
        made = await asyncio.gather(*(create((one, two)[i % 2], key="k") for i in range(10)))
        other = await create(one, key="other")
        assert all(response.store for response in made)
        kept = await entries(node)
        assert len(kept) == 4
        assert other.id in kept
        last = await create(two, key="k")
        assert last.id in await entries(node)
        assert len(await entries(node)) == 4


async def test_response_over_the_bound_on_bytes_reports_that_it_is_not_stored(node: FakeNode, serve: ServeFn) -> None:
    await node.engine("alpha")
    async with serve(responses_bytes_per_key=2048) as gateway:
        await until_listed(gateway, CARDS)
        response = await create(gateway, input="x" * 1500)
        last = await create(gateway, input="x" * 1500, stream=True)
        assert (response.store, last.store) == (False, False)
        assert (response.output_text, last.output_text) == (TEXT, TEXT)


async def test_repeated_idempotent_request_has_one_stored_response(gateway: Served, node: FakeNode) -> None:
    engine = await node.engine("alpha")
    headers, asked = {"idempotency-key": "k"}, {"model": "alpha", "input": "Hi"}
    answers = [(await gateway.http.post("/v1/responses", json=asked, headers=headers)).json() for _ in range(2)]
    assert answers[0] == answers[1]
    assert await entries(node) == [answers[0]["id"]]
    assert len(engine.requests) == 1
    stored = await gateway.http.get(f"/v1/responses/{answers[0]['id']}")
    assert json.loads(stored.text) == answers[0]
