"""POST /v1/rerank and /v1/score are scored by the gateway or forwarded to the engine."""

from __future__ import annotations

from typing import Any

import pytest

from services.gateway.authorization import hash_key
from shared.contracts import subjects
from shared.messaging.streams import catalog_bucket
from tests.integration.gateway.conftest import CARDS, Served, ServeFn, until_listed
from tests.support.fake_engine import FakeNode, card_of

RERANK: dict[str, Any] = {"model": "vectors", "query": "q", "documents": ["a", "b"]}
"""The vectors of the fake engine are (i, 0.5, -1) for input i: the first document is nearer."""


async def test_embedding_models_rerank_and_score(gateway: Served, node: FakeNode) -> None:
    engine = await node.engine("vectors")
    ranked = (await gateway.http.post("/v1/rerank", json=RERANK)).json()
    assert [r["index"] for r in ranked["results"]] == [0, 1]
    assert [r["relevance_score"] for r in ranked["results"]] == pytest.approx([0.745356, 0.487950], abs=1e-6)
    assert ranked["usage"] == {"prompt_tokens": 7, "total_tokens": 7}
    scored = (await gateway.http.post("/v1/score", json={"model": "vectors", "text_1": "q", "text_2": "a"})).json()
    assert scored["data"] == [{"index": 0, "object": "score", "score": ranked["results"][0]["relevance_score"]}]
    assert [(r.request.endpoint, r.request.body["input"]) for r in engine.requests] == [
        ("embedding", ["q", "a", "b"]),
        ("embedding", ["q", "a"]),
    ]


async def test_refusals_have_openais_form(node: FakeNode, serve: ServeFn) -> None:
    async with serve(max_prompts=2, api_keys=hash_key("sk-mine")) as gateway:
        assert (await gateway.http.post("/v1/rerank", json=RERANK)).status_code == 401
        gateway.http.headers["authorization"] = "Bearer sk-mine"
        for body, status, text in (
            (RERANK, 400, "3 inputs, and the limit is 2"),
            (RERANK | {"top_n": 0}, 400, "top_n"),
            (RERANK | {"model": "alpha"}, 404, "does not serve /v1/rerank"),
            (RERANK | {"model": "unknown"}, 404, "does not exist"),
        ):
            answer = await gateway.http.post("/v1/rerank", json=body)
            assert answer.status_code == status
            assert text in answer.json()["error"]["message"]


async def test_engine_that_serves_the_route_gets_the_request(gateway: Served, node: FakeNode) -> None:
    own = card_of("ranker", task="embed", engine="vllm", routes=("/v1/rerank",))
    bucket = await catalog_bucket(node.mesh.nc.jetstream())
    await bucket.put(subjects.token(own.name), own.model_dump_json().encode())
    await until_listed(gateway, (*CARDS, own))
    engine = await node.engine("ranker")
    body = RERANK | {"model": "ranker"}
    assert (await gateway.http.post("/v1/rerank", json=body)).json() == {"route": "/v1/rerank", "asked": body}
    assert engine.requests[0].request.endpoint == "other"
