"""Tools of a request: checks, forms of calls, and grammars that hold calls to their schemas."""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path
from typing import Any

import pytest

from services.engine.domain.output_format import OutputFormat
from services.engine.domain.tool_grammar import MAX_CALLS, write_tool_grammar
from services.engine.domain.tool_request import may_be_enforced, read_tools, shorten_call_ids
from services.engine.generation.request import GenerationRequest
from services.engine.grammar.compiler import Grammar, GrammarCompiler
from services.engine.server.request_reader import Capacity, RequestReader
from services.engine.tokenization import Tokenization
from services.gateway.domain.tool_calls.parser import ToolCallParser
from services.gateway.domain.tool_calls.pieces import Arguments, Text
from shared.contracts.engines import ToolFormat
from shared.contracts.inference import InferRequest
from shared.errors import EngineFailed, InvalidRequest, UnsupportedParameter
from shared.tool_calls.families import FAMILIES
from tests.support.tool_texts import write_calls
from tests.unit.engine.random_output import EOS, generate

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"place": {"enum": ["Bern", "Rome"]}},
    "required": ["place"],
    "additionalProperties": False,
}
FORMS: list[ToolFormat] = list(FAMILIES)


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
        # Random reasoning would not end.
        begin = tokens.encode("<|channel|>commentary", special_tokens=False) if form == "openai" else ()
        made = generate(grammar, seed, limit=4000, begin=begin)
        assert made[-1] in EOS
        text = tokens.decode(made)
        parser = ToolCallParser(form, {"weather": SCHEMA, "news": SCHEMA})
        pieces = parser.feed(text) + parser.finish()
        assert 1 <= parser.calls <= (MAX_CALLS if choice == "required" and parallel else 1)
        assert not [piece for piece in pieces if isinstance(piece, Text)], text
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
    grammar = compiler.compile(write_tool_grammar(asked, form, {}))
    text = "Free text, and 1 < 2 [x]"
    assert accepts(grammar, tokens, f"<|channel|>final<|message|>{text}" if form == "openai" else text)
    call = write(form, ("weather", {"place": "Bern"}))
    assert accepts(grammar, tokens, call)
    if not FAMILIES[form].is_anchored and form != "openai":
        assert accepts(grammar, tokens, f"Let me see.\n{call}")
    assert not accepts(grammar, tokens, call.replace("weather", "other"))
    assert not accepts(grammar, tokens, call.replace("Bern", "Oslo"))


@pytest.mark.parametrize("form", FORMS)
def test_tools_beside_strict_ones_have_any_arguments(compiler: GrammarCompiler, tokens: Tokenization, form: ToolFormat) -> None:
    asked = read_tools([function("weather", strict=True), function("news")], "auto", True)
    assert asked is not None
    grammar = compiler.compile(write_tool_grammar(asked, form, {}))
    for arguments in ({"place": "Oslo"}, {"place": "Bern", "other": "a b"}, {}):
        call = write(form, ("news", arguments))
        assert accepts(grammar, tokens, call)
        parser = ToolCallParser(form, {"weather": SCHEMA, "news": SCHEMA})
        pieces = parser.feed(call) + parser.finish()
        assert json.loads("".join(piece.text for piece in pieces if isinstance(piece, Arguments))) == arguments
        assert not accepts(grammar, tokens, write(form, ("weather", arguments)))
    assert accepts(grammar, tokens, write(form, ("weather", {"place": "Bern"})))
    values = {"text": "a", "count": 3, "flag": True, "none": None, "many": [1, "b"], "inner": {"a": "b"}}
    assert accepts(grammar, tokens, write(form, ("news", values)))


def test_a_schema_that_cannot_be_enforced_is_refused_only_where_it_must_be() -> None:
    unsupported = function("news", {"type": "object", "patternProperties": {"a": {}}})
    strict = function("weather", strict=True)
    for form in FORMS:
        asked = read_tools([strict, unsupported], "auto", True)
        assert asked is not None
        write_tool_grammar(asked, form, {})
    demanded = read_tools([strict, unsupported], "required", True)
    assert demanded is not None
    with pytest.raises(InvalidRequest, match="patternProperties"):
        write_tool_grammar(demanded, "qwen3_coder", {})


def write(form: ToolFormat, *calls: tuple[str, dict[str, Any]]) -> str:
    """Write calls as a grammar has them, without markers that may be omitted."""
    return write_calls(form, calls).removesuffix("<|call|>").replace("<|python_start|>", "").replace("<|python_end|>", "")


def accepts(grammar: Grammar, tokens: Tokenization, text: str) -> bool:
    """True if the response may be `text`."""
    matcher = grammar.new_matcher()
    return all(matcher.consume_token(token) for token in tokens.encode(text, special_tokens=False)) and matcher.is_accepting


TYPED: dict[str, Any] = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "short": {"type": "string", "maxLength": 4},
        "at": {"enum": ["Bern", "Rome"]},
        "count": {"type": "integer", "minimum": 1, "maximum": 9},
        "flag": {"type": "boolean"},
        "either": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "many": {"type": "array", "items": {"type": "integer"}},
        "inner": {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"], "additionalProperties": False},
    },
    "required": ["text", "count"],
    "additionalProperties": False,
}
ACCEPTED: list[dict[str, Any]] = [
    {"text": "a", "count": 3},
    {"text": "é {x} </a>", "short": "abcd", "at": "Rome", "count": 9, "flag": True, "either": None, "many": [1, 2]},
    {"text": "", "count": 1, "flag": False, "many": []},
]
REFUSED: list[dict[str, Any]] = [
    {"text": "a"},
    {"text": "a", "count": 10},
    {"text": "a", "count": "many"},
    {"text": "a", "short": "abcde", "count": 1},
    {"text": "a", "at": "Oslo", "count": 1},
    {"text": "a", "count": 1, "other": 1},
]


@pytest.mark.parametrize("form", FORMS)
def test_the_grammar_of_a_family_accepts_its_own_text_and_no_other(
    compiler: GrammarCompiler, tokens: Tokenization, form: ToolFormat
) -> None:
    asked = read_tools([function("f", TYPED), function("g", {"type": "object", "properties": {}})], "required", True)
    assert asked is not None
    grammar = compiler.compile(write_tool_grammar(asked, form, {}))
    for arguments in ACCEPTED:
        assert accepts(grammar, tokens, write(form, ("f", arguments))), arguments
        if form != "openai":
            assert accepts(grammar, tokens, write(form, ("f", arguments), ("g", {}), ("f", arguments))), arguments
    for arguments in REFUSED:
        assert not accepts(grammar, tokens, write(form, ("f", arguments))), arguments
    assert not accepts(grammar, tokens, write(form, ("h", {})))
    assert not accepts(grammar, tokens, "No call.")


@pytest.mark.parametrize("form", FORMS)
def test_random_arguments_of_all_types_are_parsed_as_valid(
    compiler: GrammarCompiler, tokens: Tokenization, form: ToolFormat
) -> None:
    asked = read_tools([function("f", TYPED)], "required", False)
    assert asked is not None
    grammar = compiler.compile(write_tool_grammar(asked, form, {}))
    for seed in range(4):
        made = generate(grammar, seed, limit=1500)
        text = tokens.decode(made)
        parser = ToolCallParser(form, {"f": TYPED})
        pieces = parser.feed(text) + parser.finish()
        if made[-1] not in EOS:
            continue  # random text rarely ends
        (arguments,) = [piece.text for piece in pieces if isinstance(piece, Arguments)]
        found = json.loads(arguments)
        assert {"text", "count"} <= found.keys() <= TYPED["properties"].keys(), text
        assert isinstance(found["text"], str)
        assert 1 <= found["count"] <= 9
        assert len(found.get("short", "")) <= 4
        assert found.get("at", "Bern") in ("Bern", "Rome")
        assert isinstance(found.get("flag", True), bool)
        assert isinstance(found.get("either"), str | None)
        assert all(isinstance(each, int) for each in found.get("many", ()))
        assert isinstance(found.get("inner", {"a": ""})["a"], str)


LISTED: dict[str, Any] = {
    "type": "object",
    "$defs": {"Color": {"type": "string", "enum": ["red", "green"], "title": "Color"}},
    "properties": {
        "color": {"$ref": "#/$defs/Color", "description": "Of the wall"},
        "maybe": {"anyOf": [{"$ref": "#/$defs/Color"}, {"type": "null"}]},
        "size": {"type": ["string", "null"], "enum": ["small", "large", None]},
        "level": {"anyOf": [{"const": "low"}, {"const": "high"}]},
        "code": {"anyOf": [{"type": "string", "maxLength": 3}, {"type": "null"}]},
        "digit": {"type": ["string", "integer"], "enum": ["5", 6]},
        "on": {"type": "boolean", "const": True},
    },
    "required": ["color", "maybe", "size", "level", "code", "digit", "on"],
    "additionalProperties": False,
}
"""As clients write classes with enumerations and optional fields."""
TAGGED: list[ToolFormat] = ["minimax_m2", "seed_oss", "qwen3_coder", "glm45", "glm47"]


@pytest.mark.parametrize("form", [form for form in FORMS if form not in ("gemma4", "functiongemma")])
def test_enumerations_in_references_and_choices_are_parsed_as_valid(
    compiler: GrammarCompiler, tokens: Tokenization, form: ToolFormat
) -> None:
    """The reader takes a string between tags as it is: with quotes it would be another value."""
    asked = read_tools([function("f", LISTED)], "required", False)
    assert asked is not None
    grammar = compiler.compile(write_tool_grammar(asked, form, {}))
    begin = tokens.encode("<|channel|>commentary", special_tokens=False) if form == "openai" else ()
    for seed in range(6):
        made = generate(grammar, seed, limit=4000, begin=begin)
        assert made[-1] in EOS
        parser = ToolCallParser(form, {"f": LISTED})
        pieces = parser.feed(tokens.decode(made)) + parser.finish()
        found = json.loads("".join(piece.text for piece in pieces if isinstance(piece, Arguments)))
        assert found.keys() == LISTED["properties"].keys()
        assert found["color"] in ("red", "green")
        assert found["maybe"] in ("red", "green", None)
        assert found["size"] in ("small", "large", None)
        assert found["level"] in ("low", "high")
        assert found["code"] is None or len(found["code"]) <= 3
        assert found["digit"] in ("5", 6)
        assert found["on"] is True


@pytest.mark.parametrize("form", TAGGED)
def test_texts_of_enumerations_between_tags_are_enforced(compiler: GrammarCompiler, tokens: Tokenization, form: ToolFormat) -> None:
    asked = read_tools([function("f", LISTED)], "required", False)
    assert asked is not None
    grammar = compiler.compile(write_tool_grammar(asked, form, {}))
    valid = {"color": "red", "maybe": "green", "size": None, "level": "high", "code": None, "digit": 6, "on": True}
    assert accepts(grammar, tokens, write(form, ("f", valid)))
    assert accepts(grammar, tokens, write(form, ("f", valid | {"maybe": None, "size": "small"})))
    for other in ({"color": "blue"}, {"maybe": "blue"}, {"size": "medium"}, {"level": "mid"}, {"code": "abcd"}, {"on": False}):
        assert not accepts(grammar, tokens, write(form, ("f", valid | other))), other


@pytest.mark.parametrize("form", ["gemma4", "functiongemma"])
def test_lists_of_types_are_enforced_between_bare_keys(compiler: GrammarCompiler, tokens: Tokenization, form: ToolFormat) -> None:
    """Optional fields of a strict schema have a list of types."""
    properties = {
        "size": {"type": ["string", "null"], "enum": ["small", None]},
        "note": {"type": ["string", "null"]},
        "count": {"type": ["integer", "null"]},
    }
    schema = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    asked = read_tools([function("f", schema)], "required", False)
    assert asked is not None
    grammar = compiler.compile(write_tool_grammar(asked, form, {}))
    for valid in ({"size": "small", "note": "a", "count": 3}, {"size": None, "note": None, "count": None}):
        text = write(form, ("f", valid))
        assert accepts(grammar, tokens, text), text
        parser = ToolCallParser(form, {"f": schema})
        pieces = parser.feed(text) + parser.finish()
        assert json.loads("".join(piece.text for piece in pieces if isinstance(piece, Arguments))) == valid
    assert not accepts(grammar, tokens, write(form, ("f", {"size": "large", "note": "a", "count": 3})))
    assert not accepts(grammar, tokens, write(form, ("f", {"size": "small", "note": 1, "count": 3})))


def test_definitions_are_written_only_for_arguments_that_refer_to_them() -> None:
    """Else a few dozen numbers and a large definition are over the limit of a request's tools."""
    large = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(500)}}
    properties = {f"n{i}": {"type": "integer"} for i in range(40)} | {"large": {"$ref": "#/$defs/Large"}}
    schema = {"type": "object", "$defs": {"Large": large}, "properties": properties}
    asked = read_tools([function("f", schema)], "required", False)
    assert asked is not None
    assert write_tool_grammar(asked, "qwen3_coder", {}).text.count('"$defs"') == 1


def test_references_and_choices_that_explode_take_bounded_time() -> None:
    levels = {f"L{i}": {"anyOf": [{"$ref": f"#/$defs/L{i + 1}"}] * 32} for i in range(8)}
    loop = {"Loop": {"$ref": "#/$defs/Loop"}}
    properties = {f"p{i}": {"$ref": "#/$defs/L0"} for i in range(100)} | {"loop": {"$ref": "#/$defs/Loop"}}
    schema = {"type": "object", "$defs": levels | {"L8": {"type": "integer"}} | loop, "properties": properties}
    asked = read_tools([function("f", schema)], "required", False)
    assert asked is not None
    begun = time.process_time()
    with contextlib.suppress(InvalidRequest):
        write_tool_grammar(asked, "qwen3_coder", {})
    assert time.process_time() - begun < 5


@pytest.mark.parametrize("form", ["qwen3_coder", "pythonic", "functiongemma"])
@pytest.mark.parametrize(
    "schema", [{"anyOf": [{"type": "object"}]}, {"type": "object", "properties": {"a b": {}}, "required": ["a b"]}]
)
def test_schemas_that_a_notation_cannot_enforce_are_refused(form: ToolFormat, schema: Any) -> None:
    asked = read_tools([function("f", schema)], "required", False)
    assert asked is not None
    with pytest.raises(InvalidRequest, match="cannot be enforced") as refused:
        write_tool_grammar(asked, form, {})
    assert refused.value.param == "tools"


@pytest.mark.parametrize("form", ["qwen3_coder", "functiongemma"])
def test_enumerations_without_a_value_of_their_types_are_refused(form: ToolFormat) -> None:
    schema = {"type": "object", "properties": {"size": {"type": ["string", "null"], "enum": [1]}}}
    asked = read_tools([function("f", schema)], "required", False)
    assert asked is not None
    with pytest.raises(InvalidRequest, match="cannot be enforced"):
        write_tool_grammar(asked, form, {})


def test_integers_with_a_fraction_of_zero_are_integers(compiler: GrammarCompiler, tokens: Tokenization) -> None:
    schema = {"type": "object", "properties": {"size": {"type": "integer", "enum": [1.0, 2.0]}}, "required": ["size"]}
    asked = read_tools([function("f", schema)], "required", False)
    assert asked is not None
    grammar = compiler.compile(write_tool_grammar(asked, "qwen3_coder", {}))
    parser = ToolCallParser("qwen3_coder", {"f": schema})
    pieces = parser.feed(tokens.decode(generate(grammar, 1, limit=4000))) + parser.finish()
    found = json.loads("".join(piece.text for piece in pieces if isinstance(piece, Arguments)))
    assert found["size"] in (1, 2)


def test_markers_that_are_special_tokens_are_written_as_tokens(compiler: GrammarCompiler, tokens: Tokenization) -> None:
    asked = read_tools([function("weather")], "required", True)
    assert asked is not None
    special = {"<｜tool▁calls▁begin｜>": 1, "<｜tool▁sep｜>": 2}
    text = write_tool_grammar(asked, "deepseek_v31", special).text
    assert "<[1]>" in text
    assert "<[2]>" in text
    assert not any(mark in text for mark in special)
    assert generate(compiler.compile(write_tool_grammar(asked, "deepseek_v31", {"<｜tool▁calls▁begin｜>": 1})), 1)[0] == 1


def test_format_of_the_content_is_an_alternative_to_calls(compiler: GrammarCompiler, tokens: Tokenization) -> None:
    asked = read_tools(TOOLS, None, None)
    assert asked is not None
    content = OutputFormat("json_schema", json.dumps(SCHEMA), "response_format")
    grammar = compiler.compile(write_tool_grammar(asked, "hermes", {}, content))
    for text in ('{"place": "Rome"}', '<tool_call>\n{"name": "news", "arguments": {"place": "Rome"}}\n</tool_call>'):
        matcher = grammar.new_matcher()
        assert all(matcher.consume_token(token) for token in tokens.encode(text, special_tokens=False))
        assert matcher.is_accepting
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


def test_ids_of_calls_are_short_for_mistral() -> None:
    message = {"role": "assistant", "tool_calls": [{"id": "call_0123"}, {"id": "abcDEF123"}]}
    first, second = shorten_call_ids(message)["tool_calls"]
    assert len(first["id"]) == 9
    assert second["id"] == "abcDEF123"
    assert shorten_call_ids({"role": "tool", "tool_call_id": "call_0123"})["tool_call_id"] == first["id"]


def read(tokens: Tokenization, form: ToolFormat | None = None, context: int = 2048, **body: Any) -> GenerationRequest:
    capacity = Capacity(context, 2 * context, tokens.size)
    reader = RequestReader(tokens, capacity, frozenset(EOS), {}, generates=True, revision="rev", tool_parser=form)
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


def test_schemas_of_all_tools_together_are_bounded_before_they_are_compiled(
    tokens: Tokenization, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise AssertionError("it was compiled")

    monkeypatch.setattr(GrammarCompiler, "compile", fail)
    tools = [function(f"f{i}", {"type": "object", "description": "x" * 50_000}) for i in range(3)]
    with pytest.raises(InvalidRequest, match="the limit is") as refused:
        read(tokens, context=1_000_000, tools=tools, tool_choice="required")
    assert refused.value.param == "tools"


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
