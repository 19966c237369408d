"""Structured output of an engine: in batches, streamed, and continued on another engine.

The model has random weights, so only the masks make its output valid.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from services.engine.generation.request import GenerationRequest
from services.gateway.domain.tool_calls.parser import ToolCallParser
from services.gateway.domain.tool_calls.pieces import Arguments
from shared.contracts.inference import InferFailed, InferRequest
from tests.integration.engine.loaded_model import LoadedModel
from tests.integration.engine.model_families import save
from tests.integration.engine.recorded_batcher import RecordedBatcher, cut, flat, request
from tests.support.engines import Engines

pytestmark = pytest.mark.usefixtures("one_thread")

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "sizes": {"type": "array", "items": {"enum": [1, 22, 333]}, "minItems": 1, "maxItems": 2},
    },
    "required": ["name", "sizes"],
    "additionalProperties": False,
}
FORMAT = {"structured_outputs": {"json": SCHEMA}, "max_tokens": 160}
BODIES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 1.0, "seed": 3, "n": 2},
    "penalised": {"temperature": 0.8, "frequency_penalty": 0.6, "repetition_penalty": 1.3, "seed": 7},
    "logprobs": {"logprobs": 3},
}


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory, demo_directory: Path) -> Iterator[LoadedModel]:
    loaded = LoadedModel(save("llama", tmp_path_factory.mktemp("structured") / "m", demo_directory, torch.float32), "float32")
    yield loaded
    loaded.close()


@pytest.fixture
def reported(loaded: LoadedModel) -> Iterator[RecordedBatcher]:
    reported = RecordedBatcher(loaded)
    yield reported
    reported.close()


def check(text: str) -> None:
    value = json.loads(text)
    assert value.keys() == {"name", "sizes"}
    assert len(value["name"]) <= 5
    assert 1 <= len(value["sizes"]) <= 2
    assert set(value["sizes"]) <= {1, 22, 333}


@pytest.mark.parametrize("body", BODIES)
def test_response_continued_at_any_token_equals_the_undisturbed_one(
    loaded: LoadedModel, reported: RecordedBatcher, body: str
) -> None:
    """As after a migration or a failure: the other engine replays the tokens."""
    asked = {**FORMAT, "ignore_eos": False, **BODIES[body]}
    first = request(loaded, "whole", **asked)
    whole = reported.answer(first)
    for deltas in whole.values():
        text, _, _, finish = flat(deltas)
        check(text)
        assert finish == ["stop"]
    for count in (1, 4, len(whole[0]) // 2, len(whole[0]) - 1):
        at = {index: min(count, len(deltas) - 1) for index, deltas in whole.items()}
        rest = reported.answer(request(loaded, f"cut-{count}", cut(whole, at, first), **asked))
        for index, deltas in whole.items():
            assert flat([*deltas[: at[index]], *rest[index]]) == flat(deltas), (count, index)


def test_constrained_and_free_requests_share_steps(loaded: LoadedModel, reported: RecordedBatcher) -> None:
    free = request(loaded, "free")
    alone = flat(reported.answer(free)[0])
    bodies: dict[str, dict[str, Any]] = {
        "schema": {**FORMAT},
        "object": {"guided_json": {"type": "object"}, "max_tokens": 12},
        "regex": {"guided_regex": "[a-c]{4}!"},
        "choice": {"guided_choice": ["first", "second"], "temperature": 1.0},
        "stop": {"guided_choice": ["first and last"], "stop": [" and"]},
    }
    reported.answer(request(loaded, "free-2"), *(request(loaded, n, **{"ignore_eos": False, **b}) for n, b in bodies.items()))
    ends = {name: flat(reported.deltas[name][0]) for name in bodies}
    assert flat(reported.deltas["free-2"][0]) == alone
    check(ends["schema"][0])
    assert re.fullmatch("[a-c]{4}!", ends["regex"][0])
    assert ends["choice"][0] in ("first", "second")
    assert ends["stop"][0] == "first"
    assert ends["object"][0].startswith("{")
    assert [ends[name][3] for name in bodies if name != "object"] == [["stop"]] * 4


def test_response_cut_by_max_tokens_ends_with_length(loaded: LoadedModel, reported: RecordedBatcher) -> None:
    text, tokens, _, finish = flat(reported.answer(request(loaded, "r", guided_regex="a{500}", max_tokens=7))[0])
    assert (set(text), len(tokens), finish) == ({"a"}, 7, ["length"])


def test_preempted_sequence_continues_in_its_grammar(loaded: LoadedModel) -> None:
    """Memory for one sequence and a half: they preempt each other, and both end in the grammar."""
    small = LoadedModel.__new__(LoadedModel)
    small.__dict__ = loaded.__dict__ | {"limits": type(loaded.limits)(8, 3, 8192, 16)}
    reported = RecordedBatcher(small)
    body: dict[str, Any] = {"prompt": list(range(1, 90)), "guided_regex": "[a-z]{200}", "max_tokens": 60}
    try:
        whole = flat(reported.answer(request(loaded, "alone", **body))[0])
        reported.answer(*(request(loaded, f"r{i}", **body) for i in range(3)))
        assert [flat(reported.deltas[f"r{i}"][0]) for i in range(3)] == [whole] * 3
    finally:
        reported.close()


async def test_engine_process_serves_formats_and_refuses_bad_ones(engines: Engines, instance: tuple[str, int]) -> None:
    async def ask(**body: Any) -> Any:
        return await engines.answer(instance[0], "chat", messages=[{"role": "user", "content": "Hello"}], temperature=0, **body)

    wanted = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}}
    stream = await ask(response_format=wanted, max_tokens=160)
    check(stream.text())
    assert stream.finish() == "stop"
    bad: list[dict[str, Any]] = [{"type": "objec"}, {"not": {}}, {"$ref": "#"}]
    for schema in bad:
        refused = (await ask(response_format={"type": "json_schema", "json_schema": {"schema": schema}}, max_tokens=4)).replies[-1]
        assert isinstance(refused, InferFailed)
        assert (refused.error.status, refused.error.param) == (400, "response_format")
    assert (await ask(response_format={"type": "text"}, max_tokens=4)).finish() == "length"


@pytest.mark.parametrize("choice", ["required", "auto"])
def test_tool_calls_continued_at_any_token_equal_the_undisturbed_ones(
    loaded: LoadedModel, reported: RecordedBatcher, choice: str
) -> None:
    """The gateway parses the text of both engines as one."""
    tools = [{"type": "function", "function": {"name": "f", "parameters": SCHEMA, "strict": True}}]
    asked = {"messages": [{"role": "user", "content": "Hi"}], "tools": tools, "tool_choice": choice, "parallel_tool_calls": False}
    asked |= {"model": "m", "max_tokens": 240, "temperature": 0}

    def read(name: str, resume: Any = None) -> GenerationRequest:
        ask = InferRequest(request_id=name, instance_id="i", model="m", endpoint="chat", body=asked, resume=resume)
        found = loaded.computable.reader.read(ask)
        assert isinstance(found, GenerationRequest)
        return found

    first = read("whole")
    whole = reported.answer(first)
    text, tokens, _, finish = flat(whole[0])
    assert first.tool_format == "hermes"
    if choice == "required":
        assert finish == ["stop"]
        check(parsed([text])[0])
    for count in (1, len(tokens) // 3, len(tokens) - 1):
        rest = reported.answer(read(f"cut-{count}", cut(whole, {0: count}, first)))
        assert flat([*whole[0][:count], *rest[0]]) == flat(whole[0]), count
        assert parsed(d.text for d in [*whole[0][:count], *rest[0]]) == parsed([text])


def parsed(texts: Iterable[str]) -> list[str]:
    """Return the arguments of the calls that the gateway finds."""
    parser = ToolCallParser("hermes", {"f": SCHEMA})
    pieces = [piece for text in texts for piece in parser.feed(text)] + parser.finish()
    arguments = [""] * parser.calls
    for piece in pieces:
        if isinstance(piece, Arguments):
            arguments[piece.call] += piece.text
    return arguments
