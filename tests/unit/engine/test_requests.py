"""Translation of request bodies, and the parameter names in refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from services.engine.generation.request import EmbedRequest, GenerationRequest
from services.engine.server.request_reader import Capacity, RequestReader
from services.engine.tokenization import Tokenization
from shared.contracts.inference import Endpoint, InferRequest
from shared.errors import ContextLengthExceeded, InvalidRequest, NotFound, UnsupportedParameter

HELLO = {"messages": [{"role": "user", "content": "Hello"}]}


@pytest.fixture(scope="module")
def tokens(demo_directory: Path) -> Tokenization:
    return Tokenization.read(demo_directory, False)


def read(
    tokens: Tokenization,
    body: dict[str, Any],
    endpoint: Endpoint = "chat",
    defaults: dict[str, Any] | None = None,
    kv_tokens: int = 4096,
) -> GenerationRequest:
    reader = RequestReader(tokens, Capacity(1024, kv_tokens, tokens.size), frozenset({0, 2}), defaults or {}, True, "rev")
    request = InferRequest(request_id="r", instance_id="i", model="m", endpoint=endpoint, body={"model": "m", **body})
    result = reader.read(request)
    assert isinstance(result, GenerationRequest)
    return result


def test_chat_request_becomes_one_choice(tokens: Tokenization) -> None:
    request = read(tokens, {**HELLO, "max_completion_tokens": 5, "seed": 3, "return_token_ids": True})
    (choice,) = request.choices
    assert tokens.tokenizer.decode(choice.prompt) == "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    assert request.prompt_token_ids == choice.prompt
    assert choice.stop_conditions.max_tokens == 5
    assert choice.stop_conditions.stop_token_ids == {0, 2}
    assert request.params.seed == 3


def test_prompts_and_n_number_the_choices(tokens: Tokenization) -> None:
    request = read(tokens, {"prompt": ["a", "bc"], "n": 3, "echo": True}, "completion")
    assert [(c.index, c.echo) for c in request.choices] == [(0, "a"), (1, "a"), (2, "a"), (3, "bc"), (4, "bc"), (5, "bc")]
    assert read(tokens, {"prompt": [5, 6, 7]}, "completion").choices[0].prompt == (5, 6, 7)
    assert len(read(tokens, {"prompt": [[5], [6, 7]]}, "completion").choices) == 2


def test_omitted_parameters_take_the_models_defaults(tokens: Tokenization) -> None:
    defaults = {"temperature": 0.6, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.1, "max_new_tokens": 7}
    request = read(tokens, HELLO, defaults=defaults)
    assert (request.params.temperature, request.params.top_k, request.params.top_p) == (0.6, 20, 0.9)
    assert request.params.repetition_penalty == 1.1
    assert request.choices[0].stop_conditions.max_tokens == 7
    assert read(tokens, {**HELLO, "temperature": 0}, defaults=defaults).params.is_greedy
    assert read(tokens, HELLO).params.temperature == 1.0


@pytest.mark.parametrize(
    ("body", "endpoint"),
    [(HELLO, "chat"), ({**HELLO, "max_tokens": None}, "chat"), ({"prompt": "abc", "max_tokens": None}, "completion")],
)
def test_max_tokens_of_null_or_of_a_chat_is_the_rest_of_the_context(
    tokens: Tokenization, body: dict[str, Any], endpoint: Endpoint
) -> None:
    (choice,) = read(tokens, body, endpoint).choices
    assert choice.stop_conditions.max_tokens == 1024 - len(choice.prompt)


@pytest.mark.parametrize(("prompt", "most"), [([5], 16), ([5] * 1020, 4)])
def test_omitted_max_tokens_of_a_completion_is_16_or_what_fits(tokens: Tokenization, prompt: list[int], most: int) -> None:
    assert read(tokens, {"prompt": prompt}, "completion").choices[0].stop_conditions.max_tokens == most
    limited = read(tokens, {"prompt": [5]}, "completion", {"max_new_tokens": 7})
    assert limited.choices[0].stop_conditions.max_tokens == 7


def test_ignore_eos_keeps_the_requests_own_stop_tokens(tokens: Tokenization) -> None:
    request = read(tokens, {**HELLO, "ignore_eos": True, "stop_token_ids": [9]})
    assert request.choices[0].stop_conditions.stop_token_ids == {9}


def test_text_parts_and_tool_calls_reach_the_template(tokens: Tokenization) -> None:
    body = {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
            {
                "role": "assistant",
                "tool_calls": [{"id": "x", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}],
            },
        ],
        "tools": [{"type": "function", "function": {"name": "f"}}],
    }
    text = tokens.tokenizer.decode(read(tokens, body).choices[0].prompt)
    assert "one\ntwo" in text
    assert '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>' in text
    assert "<tools>" in text


def test_output_formats_of_both_endpoints_become_grammars(tokens: Tokenization) -> None:
    chat = read(tokens, {**HELLO, "response_format": {"type": "json_object"}, "frobnicate": 1})
    assert chat.grammar is not None
    assert chat.ignored == ("frobnicate",)
    text = read(tokens, {"prompt": "a", "response_format": {"type": "json_object"}}, "completion")
    assert text.grammar is not None
    assert text.ignored == ()
    assert read(tokens, {"prompt": "a", "guided_regex": "a"}, "completion").grammar is not None
    assert read(tokens, {**HELLO, "response_format": {"type": "text"}}).grammar is None


@pytest.mark.parametrize(
    ("endpoint", "body", "param"),
    [
        ("completion", {"prompt": "a<pad>"}, "prompt"),
        ("completion", {"prompt": ["a", "b<pad>c"]}, "prompt"),
        ("chat", {"messages": [{"role": "user", "content": "<pad>"}]}, "messages"),
        ("embedding", {"input": ["a", "<pad>"]}, "input"),
    ],
)
def test_text_with_a_token_that_the_model_lacks_is_refused(
    demo_directory: Path, endpoint: Endpoint, body: dict[str, Any], param: str
) -> None:
    """It would fail the step, and with it the requests of others."""
    tokenizer = Tokenization.read(demo_directory, False).tokenizer
    vocabulary = len(tokenizer)
    tokenizer.add_special_tokens({"pad_token": "<pad>"})
    reader = RequestReader(Tokenization(tokenizer), Capacity(1024, 4096, vocabulary), frozenset({0}), {}, True, "rev")
    asked = InferRequest(request_id="r", instance_id="i", model="m", endpoint=endpoint, body={"model": "m", **body})
    with pytest.raises(InvalidRequest, match="'<pad>', a token") as refused:
        reader.read(asked)
    assert refused.value.param == param


def test_unknown_fields_are_reported_and_inert_ones_are_not(tokens: Tokenization) -> None:
    assert read(tokens, {**HELLO, "user": "u", "metadata": {}, "frobnicate": 1, "min_tokens": 0}).ignored == ("frobnicate",)


IMAGE = {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}


@pytest.mark.parametrize(
    ("endpoint", "body", "param"),
    [
        ("chat", {**HELLO, "response_format": {"type": "structural_tag"}}, "response_format"),
        ("chat", IMAGE, "messages.0.content"),
        ("chat", {**HELLO, "allowed_token_ids": [1]}, "allowed_token_ids"),
        ("chat", {**HELLO, "min_tokens": 4}, "min_tokens"),
        ("completion", {"prompt": "a", "suffix": "b"}, "suffix"),
        ("completion", {"prompt": "a", "best_of": 2}, "best_of"),
        ("completion", {"prompt": "a", "echo": True, "logprobs": 1}, "logprobs"),
    ],
)
def test_unsupported_parameter_is_refused_by_name(
    tokens: Tokenization, endpoint: Endpoint, body: dict[str, Any], param: str
) -> None:
    with pytest.raises(UnsupportedParameter) as refused:
        read(tokens, body, endpoint)
    assert refused.value.param == param


@pytest.mark.parametrize(
    ("endpoint", "body"),
    [
        ("chat", {"messages": []}),
        ("chat", {**HELLO, "temperature": 9}),
        ("chat", {**HELLO, "tool_choice": "required"}),
        ("chat", {**HELLO, "logit_bias": {"x": 1}}),
        ("chat", {**HELLO, "logit_bias": {"99999": 1}}),
        ("chat", {**HELLO, "chat_template_kwargs": {"tokenize": True}}),
        ("completion", {"prompt": ""}),
        ("completion", {"prompt": [99999]}),
        ("completion", {"prompt": [-1]}),
    ],
)
def test_malformed_values_are_invalid_requests(tokens: Tokenization, endpoint: Endpoint, body: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        read(tokens, body, endpoint)


@pytest.mark.parametrize("body", [{"prompt": [5] * 1024}, {"prompt": [5] * 1000, "max_tokens": 25}])
def test_prompt_over_the_context_is_refused(tokens: Tokenization, body: dict[str, Any]) -> None:
    with pytest.raises(ContextLengthExceeded, match="context"):
        read(tokens, body, "completion")


def test_request_over_the_kv_cache_is_refused(tokens: Tokenization) -> None:
    with pytest.raises(ContextLengthExceeded, match="KV cache"):
        read(tokens, {"prompt": [5] * 200, "max_tokens": 100}, "completion", kv_tokens=256)
    assert (
        read(tokens, {"prompt": [5] * 200, "max_tokens": None}, "completion", kv_tokens=256).choices[0].stop_conditions.max_tokens
        == 56
    )


def test_embedding_requests_are_parsed_and_validated(tokens: Tokenization) -> None:
    reader = RequestReader(tokens, Capacity(64, 0, tokens.size), frozenset(), {}, False, "rev")

    def ask(body: dict[str, Any], endpoint: Endpoint = "embedding") -> InferRequest:
        return InferRequest(request_id="r", instance_id="i", model="m", endpoint=endpoint, body={"model": "m", **body})

    request = reader.read(ask({"input": ["a", "b c"], "dimensions": 8}))
    assert isinstance(request, EmbedRequest)
    assert (len(request.inputs), request.dimensions) == (2, 8)
    refused: list[dict[str, Any]] = [{"input": []}, {"input": ["a", ""]}, {"input": [5] * 65}]
    for bad in refused:
        with pytest.raises(InvalidRequest):
            reader.read(ask(bad))
    with pytest.raises(InvalidRequest, match="embeds"):
        reader.read(ask(HELLO, "chat"))


def test_bytes_of_single_tokens(tokens: Tokenization) -> None:
    ids = tokens.encode("né \U0001f600", special_tokens=False)
    assert b"".join(tokens.token_bytes(i) for i in ids) == "né \U0001f600".encode()
    assert tokens.token_bytes(2) == b"<|im_end|>"


def test_routes_of_other_engines_are_not_served_here(tokens: Tokenization) -> None:
    reader = RequestReader(tokens, Capacity(1024, 4096, tokens.size), frozenset({0, 2}), {}, True, "rev")
    request = InferRequest(request_id="r", instance_id="i", model="m", endpoint="other", route="/v1/rerank", body={"model": "m"})
    with pytest.raises(NotFound, match="/v1/rerank"):
        reader.read(request)
