"""Tools of a request: checks, forms of calls, and grammars that hold calls to their schemas."""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path
from typing import Any

import pytest

from services.engine.domain.output_format import OutputFormat
from services.engine.domain.tool_request import (
    MAX_CALLS,
    detect_tool_format,
    may_be_enforced,
    read_tools,
    shorten_call_ids,
    write_tool_grammar,
)
from services.engine.generation.request import GenerationRequest
from services.engine.grammar.compiler import GrammarCompiler
from services.engine.server.request_reader import Capacity, RequestReader
from services.engine.tokenization import Tokenization
from services.gateway.domain.tool_calls import ToolCallParser
from shared.contracts.engines import ToolFormat
from shared.contracts.inference import InferRequest
from shared.errors import EngineFailed, InvalidRequest, UnsupportedParameter
from tests.unit.engine.test_grammar import EOS, generate

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"place": {"enum": ["Bern", "Rome"]}},
    "required": ["place"],
    "additionalProperties": False,
}
FORMS: list[ToolFormat] = ["hermes", "llama3", "mistral"]


def function(name: str, schema: Any = SCHEMA, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": schema, **more}}


TOOLS = [function("weather"), function("news")]
NAMED = {"type": "function", "function": {"name": "news"}}


@pytest.fixture(scope="module")
def tokens(demo_directory: Path) -> Tokenization:
    return Tokenization.read(demo_directory, False)


@pytest.fixture(scope="module")
def compiler(tokens: Tokenization) -> GrammarCompiler:
    return GrammarCompiler(tokens, tokens.size, EOS)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("choice", "parallel"), [("required", True), ("required", False), (NAMED, True)])
def test_random_tokens_of_a_demanded_call_are_calls(
    compiler: GrammarCompiler, tokens: Tokenization, form: ToolFormat, choice: Any, parallel: bool
) -> None:
    """The grammar of the engine and the parser of the gateway agree on each form."""
    asked = read_tools(TOOLS, choice, parallel)
    assert asked is not None
    grammar = compiler.compile(write_tool_grammar(asked, form, {}))
    for seed in range(3):
        made = generate(grammar, seed, limit=4000)
        assert made[-1] in EOS
        text = tokens.decode(made)
        parser = ToolCallParser(form, frozenset({"weather", "news"}))
        pieces = parser.feed(text) + parser.finish()
        assert 1 <= parser.calls <= (MAX_CALLS if choice == "required" and parallel else 1)
        assert not [piece for piece in pieces if not hasattr(piece, "call")], text
        names = [piece.name for piece in pieces if hasattr(piece, "name")]
        assert set(names) <= ({"news"} if choice == NAMED else {"weather", "news"})
        arguments = [piece.text for piece in pieces if hasattr(piece, "call") and hasattr(piece, "text")]
        assert all(json.loads(each)["place"] in ("Bern", "Rome") for each in arguments)
        assert len(arguments) == len(names)


def test_special_tokens_open_calls_of_mistral(compiler: GrammarCompiler, tokens: Tokenization) -> None:
    asked = read_tools(TOOLS, "required", True)
    assert asked is not None
    grammar = compiler.compile(write_tool_grammar(asked, "mistral", {"[TOOL_CALLS]": 1}))
    made = generate(grammar, 1, limit=4000)
    assert made[0] == 1
    name = str(tokens.tokenizer.convert_ids_to_tokens(1))
    assert tokens.decode_with(frozenset({1}))(made[:3]) == name + tokens.decode(made[1:3])
    assert tokens.decode(made[:3]) == tokens.decode(made[1:3])


@pytest.mark.parametrize("form", FORMS)
def test_strict_tools_leave_text_free_and_hold_calls(compiler: GrammarCompiler, tokens: Tokenization, form: ToolFormat) -> None:
    asked = read_tools([function("weather", strict=True)], "auto", True)
    assert asked is not None
    assert asked.is_enforced
    matcher = compiler.compile(write_tool_grammar(asked, form, {})).new_matcher()
    assert all(matcher.consume_token(token) for token in tokens.encode("Free text, and 1 < 2 [x]", special_tokens=False))
    assert matcher.is_accepting()
    opening = {"hermes": '<tool_call>\n{"name": "', "mistral": '[TOOL_CALLS][{"name": "', "llama3": '{"name": "'}[form]
    matcher = compiler.compile(write_tool_grammar(asked, form, {})).new_matcher()
    assert all(matcher.consume_token(token) for token in tokens.encode(opening, special_tokens=False))
    assert not matcher.consume_token(tokens.encode("other", special_tokens=False)[0])


def test_format_of_the_content_is_an_alternative_to_calls(compiler: GrammarCompiler, tokens: Tokenization) -> None:
    asked = read_tools(TOOLS, None, None)
    assert asked is not None
    content = OutputFormat("json_schema", json.dumps(SCHEMA), "response_format")
    grammar = compiler.compile(write_tool_grammar(asked, "hermes", {}, content))
    for text in ('{"place": "Rome"}', '<tool_call>\n{"name": "news", "arguments": {"place": "Rome"}}\n</tool_call>'):
        matcher = grammar.new_matcher()
        assert all(matcher.consume_token(token) for token in tokens.encode(text, special_tokens=False))
        assert matcher.is_accepting()
    for form, other in (("llama3", content), ("hermes", OutputFormat("regex", "a", "guided_regex"))):
        with pytest.raises(InvalidRequest, match="cannot be combined") as refused:
            write_tool_grammar(asked, form, {}, other)  # type: ignore[arg-type]
        assert refused.value.param == other.param


@pytest.mark.parametrize(
    ("tools", "choice", "param"),
    [
        ([{"type": "web_search"}], None, "tools"),
        ([function("a b")], None, "tools"),
        ([function("a" * 129)], None, "tools"),
        ([{"type": "function"}], None, "tools"),
        ([function("a", schema=[])], None, "tools"),
        ([function("a"), function("a")], None, "tools"),
        (TOOLS, "any", "tool_choice"),
        (TOOLS, {"type": "function", "function": {"name": "other"}}, "tool_choice"),
        ([], "required", "tool_choice"),
    ],
)
def test_malformed_tools_are_refused_by_name(tools: Any, choice: Any, param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        read_tools(tools, choice, None)
    assert refused.value.param == param


EXPLODING: list[Any] = [
    {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(1000)}},
    {"type": "string", "pattern": "^((a{1,200}){1,200}){1,200}$"},
    {"allOf": [{"anyOf": [{"type": "object", "properties": {f"k{i}_{j}": {}}} for j in range(4)]} for i in range(7)]},
]


@pytest.mark.parametrize("schema", EXPLODING, ids=lambda schema: str(schema)[:30])
def test_exploding_schemas_take_bounded_time(compiler: GrammarCompiler, schema: Any) -> None:
    begun = time.process_time()
    asked = read_tools([function("f", schema)], "required", False)
    assert asked is not None
    with contextlib.suppress(InvalidRequest, EngineFailed):
        generate(compiler.compile(write_tool_grammar(asked, "hermes", {})), 1, limit=30)
    assert time.process_time() - begun < 5


def test_only_demands_and_strict_tools_need_a_grammar() -> None:
    assert not may_be_enforced(TOOLS, None)
    assert not may_be_enforced(TOOLS, "auto")
    assert not may_be_enforced([function("f", strict=True)], "none")
    assert may_be_enforced([function("f", strict=True)], None)
    assert may_be_enforced(TOOLS, "required")
    assert may_be_enforced(TOOLS, NAMED)


def test_forms_are_detected_in_templates() -> None:
    assert detect_tool_format('…<tool_call>{"name"…') == "hermes"
    assert detect_tool_format("<tool_call><function=…") is None
    assert detect_tool_format('"[TOOL_CALLS]" + …') == "mistral"
    assert detect_tool_format("[TOOL_CALLS]…[ARGS]") is None
    assert detect_tool_format('{"name": function name, "parameters": …} ipython') == "llama3"
    assert detect_tool_format("{{ tools }}") is None


def test_ids_of_calls_are_short_for_mistral() -> None:
    message = {"role": "assistant", "tool_calls": [{"id": "call_0123"}, {"id": "abcDEF123"}]}
    first, second = shorten_call_ids(message)["tool_calls"]
    assert len(first["id"]) == 9
    assert second["id"] == "abcDEF123"
    assert shorten_call_ids({"role": "tool", "tool_call_id": "call_0123"})["tool_call_id"] == first["id"]


def read(tokens: Tokenization, form: ToolFormat | None = None, **body: Any) -> GenerationRequest:
    reader = RequestReader(
        tokens, Capacity(2048, 4096, tokens.size), frozenset(EOS), {}, generates=True, revision="rev", tool_format=form
    )
    asked = {"model": "m", "messages": [{"role": "user", "content": "Hello"}], **body}
    found = reader.read(InferRequest(request_id="r", instance_id="i", model="m", endpoint="chat", body=asked))
    assert isinstance(found, GenerationRequest)
    return found


def test_reader_renders_tools_and_names_their_form(tokens: Tokenization) -> None:
    found = read(tokens, tools=TOOLS)
    assert (found.tool_format, found.grammar) == ("hermes", None)
    assert '"news"' in tokens.decode(list(found.choices[0].prompt))
    assert read(tokens, tools=TOOLS, tool_choice="required").grammar is not None
    assert read(tokens, "llama3", tools=TOOLS).tool_format == "llama3"
    without = read(tokens, tools=TOOLS, tool_choice="none")
    assert (without.tool_format, without.choices) == (None, read(tokens).choices)


@pytest.mark.parametrize(
    ("template", "reason"),
    [("{% for m in messages %}{{ m.content }}{% endfor %}", "ignores tools"), ("{{ tools }}{{ messages }}", "not known")],
)
def test_templates_without_tools_or_with_an_unknown_form_are_refused(demo_directory: Path, template: str, reason: str) -> None:
    tokens = Tokenization.read(demo_directory, False)
    tokens.tokenizer.chat_template = template
    with pytest.raises(UnsupportedParameter, match=reason) as refused:
        read(tokens, tools=TOOLS)
    assert refused.value.param == "tools"
    assert read(tokens).tool_format is None
