"""Rerank and score requests, served by embedding models as bi-encoders.

Each text is embedded by itself, and the score of a pair is the cosine similarity of its vectors. A
cross-encoder, which reads both texts together, needs an engine that serves the route.

Fields: the rerank API of Jina and Cohere, and the score API of vLLM.
"""

from __future__ import annotations

import json
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from services.gateway.http.parsing.cooperative import TimeSlice
from services.gateway.http.parsing.validation import to_invalid_request
from services.gateway.http.translation.vectors import cosine_similarity, vector_of
from shared.compact_json import encode_json
from shared.contracts.openai import EmbeddingRequest, Texts
from shared.errors import EngineFailed, InvalidRequest

_MALFORMED = (ValueError, KeyError, TypeError, AttributeError, IndexError)


class RerankDocument(BaseModel):
    """A document as an object."""

    model_config = ConfigDict(frozen=True)

    text: str


class RerankRequest(BaseModel):
    """POST /v1/rerank."""

    model_config = ConfigDict(frozen=True)

    model: str
    query: str
    documents: Annotated[list[str | RerankDocument], Field(min_length=1, fail_fast=True)]
    top_n: int | None = Field(default=None, ge=1)
    return_documents: bool = False


class ScoreRequest(BaseModel):
    """POST /v1/score: one text with one or many, or two lists of the same length."""

    model_config = ConfigDict(frozen=True)

    model: str
    text_1: str | Texts
    text_2: str | Texts


class Scoring(ABC):
    """One request, with the texts to embed and the translation of their vectors."""

    content_type = None
    ignored: tuple[str, ...] = ()
    is_done = False

    def __init__(self, model: str, texts: list[str]) -> None:
        self.model = model
        self.texts = texts

    def on_headers(self, server_timing: str) -> None:  # noqa: B027 - the response has no durations
        """No-op: the response has no durations."""

    def feed(self, data: bytes, now: float) -> bytes:
        raise EngineFailed("The engine sent embeddings as a stream")

    async def end(self, now: float) -> bytes:
        return b""

    def embedding_request(self) -> tuple[EmbeddingRequest, bytes]:
        """Return the request for the vectors of all texts, and its body."""
        fields = {"model": self.model, "input": self.texts, "encoding_format": "base64"}
        request = EmbeddingRequest(model=self.model, input=self.texts, encoding_format="base64")
        return request, encode_json(fields)

    async def translate_body(self, status: int, body: bytes, now: float) -> tuple[int, Any]:
        """Translate the response of the embedding request; errors stay as they are.

        Raises:
            EngineFailed: It has not one vector for each text, all of the same dimension.
        """
        try:
            data = json.loads(body)
            if status >= 400:
                return status, data
            vectors = [vector_of(item["embedding"]) for item in sorted(data["data"], key=lambda item: item["index"])]
            if len(vectors) != len(self.texts):
                raise ValueError(f"{len(vectors)} vectors of {len(self.texts)} texts")
            tokens = data["usage"]["prompt_tokens"]
            usage = {"prompt_tokens": tokens, "total_tokens": tokens}
            return status, self._answer(await self._scores(vectors), usage)
        except _MALFORMED as e:
            raise EngineFailed(f"The engine sent malformed embeddings: {type(e).__name__}") from e

    async def _scores(self, vectors: list[Sequence[float]]) -> list[float]:
        scores, time_slice = [], TimeSlice()
        for first, second in self._pairs():
            scores.append(cosine_similarity(vectors[first], vectors[second]))
            await time_slice.pause()
        return scores

    @abstractmethod
    def _pairs(self) -> Sequence[tuple[int, int]]:
        """List the pairs to score, as positions in `texts`."""

    @abstractmethod
    def _answer(self, scores: list[float], usage: dict[str, int]) -> dict[str, Any]:
        """Build the response."""


class Rerank(Scoring):
    """A rerank request. The query is the first text."""

    def __init__(self, request: RerankRequest) -> None:
        documents = [d if isinstance(d, str) else d.text for d in request.documents]
        super().__init__(request.model, [request.query, *documents])
        self._request = request

    def _pairs(self) -> Sequence[tuple[int, int]]:
        return [(0, i) for i in range(1, len(self.texts))]

    def _answer(self, scores: list[float], usage: dict[str, int]) -> dict[str, Any]:
        """List the best documents first; equal ones in their order."""
        best = sorted(range(len(scores)), key=lambda i: (-scores[i], i))[: self._request.top_n]
        results: list[dict[str, Any]] = [{"index": i, "relevance_score": scores[i]} for i in best]
        if self._request.return_documents:
            for result in results:
                result["document"] = {"text": self.texts[result["index"] + 1]}
        return {"id": f"rerank-{uuid.uuid4().hex}", "model": self.model, "results": results, "usage": usage}


class Score(Scoring):
    """A score request. The texts are those of the first side, then those of the second."""

    def __init__(self, request: ScoreRequest) -> None:
        first, second = ([t] if isinstance(t, str) else list(t) for t in (request.text_1, request.text_2))
        if not first or not second or (len(first) != len(second) and len(first) != 1):
            raise InvalidRequest(
                f"text_1 has {len(first)} texts and text_2 {len(second)}. Send one text_1, or as many as text_2", param="text_1"
            )
        super().__init__(request.model, [*first, *second])
        self._first = len(first)

    def _pairs(self) -> Sequence[tuple[int, int]]:
        return [(0 if self._first == 1 else i, self._first + i) for i in range(len(self.texts) - self._first)]

    def _answer(self, scores: list[float], usage: dict[str, int]) -> dict[str, Any]:
        return {
            "id": f"score-{uuid.uuid4().hex}",
            "object": "list",
            "created": int(time.time()),
            "model": self.model,
            "data": [{"index": i, "object": "score", "score": score} for i, score in enumerate(scores)],
            "usage": usage,
        }


def read_scoring(route: str, fields: Mapping[str, Any], body: bytes) -> Scoring:
    """Validate a request of one of `SCORING_ROUTES`.

    Args:
        fields: The body, decoded.
        body: The body, for the error's path.

    Raises:
        InvalidRequest: The request is invalid.
    """
    try:
        if route == "/v1/rerank":
            return Rerank(RerankRequest.model_validate(fields))
        return Score(ScoreRequest.model_validate(fields))
    except ValidationError as e:
        raise to_invalid_request(e, body) from e


SCORING_ROUTES: dict[str, type[BaseModel]] = {"/v1/rerank": RerankRequest, "/v1/score": ScoreRequest}
