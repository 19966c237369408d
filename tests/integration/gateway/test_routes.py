"""Routes that only an engine serves.

The gateway forwards them to engines that declare them, and refuses them if none does.
"""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from nats.js.kv import KeyValue

from shared.contracts import subjects
from shared.errors import InvalidRequest
from shared.messaging.buckets import BucketWatcher
from shared.messaging.streams import catalog_bucket
from tests.integration.gateway.conftest import CARDS, Served, until_listed
from tests.support.fake_engine import FakeNode, Run, card_of

RANKER = card_of("ranker", task="embed", routes=("/v1/rerank",))
URL = "/v1/rerank"
ASKED: dict[str, Any] = {"model": "ranker", "query": "né", "documents": ["a", "b"], "top_n": 1}


@pytest.fixture
async def http(gateway: Served, node: FakeNode) -> httpx.AsyncClient:
    bucket = await catalog_bucket(node.mesh.nc.jetstream())
    await bucket.put(subjects.token(RANKER.name), RANKER.model_dump_json().encode())
    await until_listed(gateway, (*CARDS, RANKER))
    return gateway.http


async def test_declared_route_wakes_its_model_and_returns_the_engines_answer(http: httpx.AsyncClient, node: FakeNode) -> None:
    waiting = asyncio.create_task(http.post(URL, json=ASKED))
    await node.until_demand(lambda: any(d.model == "ranker" for d in node.demand))
    engine = await node.engine("ranker")
    answer = await waiting
    assert answer.status_code == 200
    assert answer.json() == {"route": URL, "asked": ASKED}
    assert "queue;dur=" in answer.headers["server-timing"]
    assert "x-thaw-usage" not in answer.headers
    assert engine.requests[0].request.endpoint == "other"
    metrics = (await http.get("/metrics")).text
    assert 'gen_ai_operation_name="other"' in metrics


async def test_a_model_that_was_registered_just_now_is_served(
    gateway: Served, node: FakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gateway has not read the change yet when the request arrives."""
    may_apply, is_behind = asyncio.Event(), asyncio.Event()
    apply, catch_up = BucketWatcher._apply_change, BucketWatcher.catch_up

    async def apply_later(self: BucketWatcher, bucket: KeyValue, watcher: Any) -> bool:
        await may_apply.wait()
        return await apply(self, bucket, watcher)

    async def notify(self: BucketWatcher, within_s: float) -> None:
        is_behind.set()
        await catch_up(self, 60)

    monkeypatch.setattr(BucketWatcher, "_apply_change", apply_later)
    bucket = await catalog_bucket(node.mesh.nc.jetstream())
    for card in (card_of("first"), card_of("late")):  # the first one ends a call of the real method
        await bucket.put(subjects.token(card.name), card.model_dump_json().encode())
    monkeypatch.setattr(BucketWatcher, "catch_up", notify)
    asked = {"model": "late", "messages": [{"role": "user", "content": "?"}]}
    response = asyncio.create_task(gateway.http.post("/v1/chat/completions", json=asked))
    async with asyncio.timeout(60):
        await is_behind.wait()
    may_apply.set()
    await node.until_demand(lambda: any(d.model == "late" for d in node.demand))
    await node.engine("late")
    assert (await response).status_code == 200
    asked["model"] = "never"
    assert (await gateway.http.post("/v1/chat/completions", json=asked)).status_code == 404


async def test_idempotency_key_applies_to_declared_routes(http: httpx.AsyncClient, node: FakeNode) -> None:
    engine = await node.engine("ranker")
    answers = [await http.post(URL, json=ASKED, headers={"idempotency-key": "k"}) for _ in range(2)]
    assert answers[0].json() == answers[1].json()
    assert len(engine.requests) == 1


async def test_refusal_by_the_engine_keeps_its_class(http: httpx.AsyncClient, node: FakeNode) -> None:
    async def refuse(run: Run) -> None:
        await run.fail(InvalidRequest("no documents", param="documents"))

    await node.engine("ranker", refuse)
    answer = await http.post(URL, json=ASKED)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "documents")


@pytest.mark.parametrize(
    ("path", "body", "status", "code", "words"),
    [
        (URL, {"model": "alpha"}, 404, "not_found", ("alpha", URL)),
        ("/v1/audio/speech", {"model": "ranker"}, 404, "not_found", ("ranker", "/v1/audio/speech")),
        (URL, {"model": "nobody"}, 404, "model_not_found", ("nobody",)),
        (URL, {"query": "q"}, 400, "invalid_request", ("model",)),
    ],
)
async def test_undeclared_route_is_refused(
    http: httpx.AsyncClient, path: str, body: dict[str, Any], status: int, code: str, words: tuple[str, ...]
) -> None:
    answer = await http.post(path, json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (status, code)
    assert all(word in error["message"] for word in words)
