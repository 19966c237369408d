"""Rerank and score by the cosine similarity of embeddings."""

from __future__ import annotations

import base64
import json
import struct
from typing import Any

import pytest

from services.gateway.http.translation.scoring import read_scoring
from shared.errors import EngineFailed, InvalidRequest

VECTORS = {"east": (1.0, 0.0), "north": (0.0, 2.0), "north-east": (1.0, 1.0), "west": (-3.0, 0.0)}


async def score(route: str, **fields: Any) -> dict[str, Any]:
    """Score texts by their vectors of `VECTORS`."""
    fields = {"model": "m"} | fields
    scoring = read_scoring(route, fields, json.dumps(fields).encode())
    request, body = scoring.embedding_request()
    assert json.loads(body) == request.model_dump(exclude_unset=True)
    embeddings = [base64.b64encode(struct.pack("<2f", *VECTORS[text])).decode() for text in json.loads(body)["input"]]
    data = [{"index": i, "embedding": e} for i, e in enumerate(embeddings)]
    answer = json.dumps({"data": data[::-1], "usage": {"prompt_tokens": 9}}).encode()
    status, scored = await scoring.translate_body(200, answer, 0.0)
    assert (status, scored["model"], scored["usage"]) == (200, "m", {"prompt_tokens": 9, "total_tokens": 9})
    return dict(scored)


async def test_documents_are_ranked_by_similarity_to_the_query() -> None:
    documents = ["west", "north", {"text": "north-east"}, "east", "north"]
    ranked = await score("/v1/rerank", query="east", documents=documents)
    assert [r["index"] for r in ranked["results"]] == [3, 2, 1, 4, 0]
    assert [r["relevance_score"] for r in ranked["results"]] == pytest.approx([1, 0.5**0.5, 0, 0, -1])
    best = await score("/v1/rerank", query="east", documents=documents, top_n=2, return_documents=True)
    assert [(r["index"], r["document"]) for r in best["results"]] == [(3, {"text": "east"}), (2, {"text": "north-east"})]


@pytest.mark.parametrize(
    ("text_1", "text_2", "expected"),
    [
        ("east", "east", [1]),
        ("east", ["west", "north"], [-1, 0]),
        (["east"], ["west", "north"], [-1, 0]),
        (["east", "north"], ["west", "north"], [-1, 1]),
    ],
)
async def test_pairs_are_scored(text_1: Any, text_2: Any, expected: list[float]) -> None:
    scored = await score("/v1/score", text_1=text_1, text_2=text_2)
    assert [(d["index"], d["object"]) for d in scored["data"]] == [(i, "score") for i in range(len(expected))]
    assert [d["score"] for d in scored["data"]] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("route", "fields", "param"),
    [
        ("/v1/rerank", {"documents": ["x"]}, "query"),
        ("/v1/rerank", {"query": "x", "documents": []}, "documents"),
        ("/v1/rerank", {"query": "x", "documents": ["y"], "top_n": 0}, "top_n"),
        ("/v1/rerank", {"query": "x", "documents": [{"title": "y"}]}, "documents[0].text"),
        ("/v1/score", {"text_1": "x"}, "text_2"),
        ("/v1/score", {"text_1": ["x", "y"], "text_2": ["z"]}, "text_1"),
        ("/v1/score", {"text_1": [], "text_2": []}, "text_1"),
    ],
)
async def test_invalid_requests_name_their_parameter(route: str, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await score(route, **fields)
    assert caught.value.param == param


@pytest.mark.parametrize("data", [{}, {"data": []}, {"data": [{"index": i, "embedding": [0.0] * (i + 1)} for i in range(2)]}, []])
async def test_malformed_embeddings_are_an_error(data: Any) -> None:
    scoring = read_scoring("/v1/score", {"model": "m", "text_1": "a", "text_2": "b"}, b"{}")
    with pytest.raises(EngineFailed):
        await scoring.translate_body(200, json.dumps(data).encode(), 0.0)


async def test_errors_of_the_engine_stay_as_they_are() -> None:
    scoring = read_scoring("/v1/score", {"model": "m", "text_1": "a", "text_2": "b"}, b"{}")
    error = {"error": {"message": "no"}}
    assert await scoring.translate_body(400, json.dumps(error).encode(), 0.0) == (400, error)
