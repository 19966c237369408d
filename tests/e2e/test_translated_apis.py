"""The real openai and anthropic clients against a real mesh, on routes that its engine lacks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import anthropic
import httpx
import numpy as np
import openai
import pytest
from pydantic import BaseModel

from tests.support.launcher import Thaw
from thaw.demo.models import make_demo_model

SHARED = True
HELLO: list[Any] = [{"role": "user", "content": "Hello"}]
ASKED: dict[str, Any] = {"model": "one", "temperature": 0}


def chat(client: openai.OpenAI, messages: list[Any]) -> str | None:
    text: str | None = client.chat.completions.create(**ASKED, messages=messages, max_tokens=8).choices[0].message.content
    return text


def test_responses_have_the_text_of_chat_completions(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {**ASKED, "input": "Hello", "max_output_tokens": 8}
    whole = client.responses.create(**asked)
    with client.responses.stream(**asked) as stream:
        events = list(stream)
    last = events[-1]
    assert last.type == "response.incomplete"
    deltas, streamed = [event.delta for event in events if event.type == "response.output_text.delta"], last.response
    assert whole.output_text == streamed.output_text == "".join(deltas) == chat(client, HELLO)
    assert whole.status == streamed.status == "incomplete"
    assert whole.usage == streamed.usage
    assert whole.usage is not None
    assert whole.usage.output_tokens == 8


def test_stored_response_is_continued(client: openai.OpenAI) -> None:
    first = client.responses.create(**ASKED, input="Hello", max_output_tokens=8)
    assert first.store
    second = client.responses.create(**ASKED, input="More", max_output_tokens=8, previous_response_id=first.id)
    conversation = [*HELLO, {"role": "assistant", "content": first.output_text}, {"role": "user", "content": "More"}]
    assert second.output_text == chat(client, conversation)
    assert client.responses.retrieve(second.id).output_text == second.output_text


def test_format_of_a_response_is_enforced(client: openai.OpenAI) -> None:
    class Size(BaseModel):
        name: Literal["small", "large"]

    response = client.responses.parse(**ASKED, input="Hello", text_format=Size, max_output_tokens=100)
    assert response.output_parsed in (Size(name="small"), Size(name="large"))


def test_messages_have_the_text_of_chat_completions(mesh: Thaw, client: openai.OpenAI) -> None:
    with anthropic.Anthropic(base_url=mesh.url, api_key="none", timeout=120) as messages:
        # This client has no parameter for the temperature any more.
        asked: dict[str, Any] = {"model": "one", "messages": HELLO, "max_tokens": 8, "extra_body": {"temperature": 0}}
        whole = messages.messages.create(**asked)
        with messages.messages.stream(**asked) as stream:
            streamed = stream.get_final_message()
    assert whole.content[0].text == streamed.content[0].text == chat(client, HELLO)
    assert whole.stop_reason == streamed.stop_reason == "max_tokens"
    assert streamed.usage.output_tokens == whole.usage.output_tokens == 8


def test_tokens_of_a_message_are_counted_as_the_engine_does(mesh: Thaw) -> None:
    asked: dict[str, Any] = {"model": "one", "system": "Be brief", "messages": HELLO}
    with anthropic.Anthropic(base_url=mesh.url, api_key="none", timeout=120) as client:
        counted = client.messages.count_tokens(**asked)
        assert counted.input_tokens == client.messages.create(**asked, max_tokens=1).usage.input_tokens


def test_format_of_a_message_is_enforced(mesh: Thaw) -> None:
    schema = {"type": "object", "properties": {"name": {"enum": ["small", "large"]}}, "required": ["name"]}
    config: Any = {"format": {"type": "json_schema", "schema": schema | {"additionalProperties": False}}}
    asked: dict[str, Any] = {"model": "one", "messages": HELLO, "max_tokens": 100, "output_config": config}
    with anthropic.Anthropic(base_url=mesh.url, api_key="none", timeout=120) as client:
        whole: Any = client.messages.create(**asked, extra_body={"temperature": 0})
        with client.messages.stream(**asked, extra_body={"temperature": 0}) as stream:
            streamed: Any = stream.get_final_message()
    assert json.loads(whole.content[0].text)["name"] in ("small", "large")
    assert (streamed.content[0].text, streamed.stop_reason) == (whole.content[0].text, "end_turn")


@pytest.fixture
def embedder(mesh: Thaw, tmp_path: Path) -> Iterator[str]:
    """Register a model of the builtin engine that embeds texts by the mean of its states."""
    source = make_demo_model(tmp_path / "vectors", "test", seed=11)
    kinds = {"": "Transformer", "1_Pooling": "Pooling"}
    modules = [{"path": path, "type": f"sentence_transformers.models.{kind}"} for path, kind in kinds.items()]
    (source / "modules.json").write_text(json.dumps(modules))
    (source / "1_Pooling").mkdir()
    (source / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_mean_tokens": True}))
    mesh.json("models", "add", "vectors", str(source))
    yield "vectors"
    mesh.json("models", "rm", "vectors")


def test_texts_are_ranked_and_scored_by_their_embeddings(mesh: Thaw, client: openai.OpenAI, embedder: str) -> None:
    query, documents = "cold start", ["a warm day", "cold start", "loading of weights"]
    first, *others = (np.array(d.embedding) for d in client.embeddings.create(model=embedder, input=[query, *documents]).data)
    expected = [float(first @ other / np.linalg.norm(first) / np.linalg.norm(other)) for other in others]
    asked = {"model": embedder, "query": query, "documents": documents, "return_documents": True}
    with httpx.Client(base_url=mesh.url, timeout=120) as http:
        ranked = http.post("/v1/rerank", json=asked).raise_for_status().json()
        best = http.post("/v1/rerank", json=asked | {"top_n": 1}).raise_for_status().json()
        scored = http.post("/v1/score", json={"model": embedder, "text_1": query, "text_2": documents}).raise_for_status().json()
    scores = {r["index"]: r["relevance_score"] for r in ranked["results"]}
    assert [scores[i] for i in range(3)] == pytest.approx(expected, abs=1e-4)
    assert [r["relevance_score"] for r in ranked["results"]] == sorted(scores.values(), reverse=True)
    assert [(r["index"], r["document"]["text"]) for r in best["results"]] == [(1, query)]
    assert best["results"][0]["relevance_score"] == pytest.approx(1, abs=1e-4)
    assert [d["score"] for d in scored["data"]] == pytest.approx(expected, abs=1e-4)
    assert scored["usage"]["prompt_tokens"] > 0
