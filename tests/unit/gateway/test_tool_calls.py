"""Tool calls in text: any division of a text gives the same deltas; the rest is content."""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.gateway.domain.tool_calls.parser import ToolCallParser
from services.gateway.domain.tool_calls.pieces import Arguments, CallStarted, Piece, Reasoning, Text
from shared.contracts.engines import ToolFormat
from shared.tool_calls.families import FAMILIES
from shared.tool_calls.family import BareArguments, Channels, JsonArguments, NamedCall, TaggedArguments
from tests.support.examples import examples
from tests.support.tool_texts import write_calls

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "at": {"enum": ["Bern", "Rome"]},
        "count": {"type": "integer"},
        "share": {"type": "number"},
        "flag": {"type": "boolean"},
        "many": {"type": "array"},
        "inner": {"$ref": "#/$defs/inner"},
        "either": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    },
    "$defs": {"inner": {"type": "object"}},
}
TOOLS = {"weather": SCHEMA, "time": SCHEMA, "a.b:c-d": SCHEMA}
FORMS: list[ToolFormat] = list(FAMILIES)


def parse(form: ToolFormat, parts: Iterable[str], *, parallel: bool = True) -> tuple[str, list[tuple[str, str]]]:
    """Return the content, and the calls with their arguments."""
    content, _, calls = parse_all(form, parts, parallel=parallel)
    return content, calls


def parse_all(form: ToolFormat, parts: Iterable[str], *, parallel: bool = True) -> tuple[str, str, list[tuple[str, str]]]:
    """Return the content, the reasoning, and the calls with their arguments."""
    parser = ToolCallParser(form, TOOLS, parallel=parallel)
    pieces: list[Piece] = [piece for part in parts for piece in parser.feed(part)] + parser.finish()
    content, reasoning, calls = "", "", list[tuple[str, str]]()
    for piece in pieces:
        match piece:
            case Text(text=text):
                content += text
            case Reasoning(text=text):
                reasoning += text
            case CallStarted(call=call, name=name):
                assert call == len(calls)
                calls.append((name, ""))
            case Arguments(call=call, text=text):
                assert call == len(calls) - 1
                calls[-1] = (calls[-1][0], calls[-1][1] + text)
    return content, reasoning, calls


CASES: list[tuple[ToolFormat, str, str, list[tuple[str, str]]]] = [
    ("hermes", '<tool_call>\n{"name": "weather", "arguments": {"at": "Bern"}}\n</tool_call>', "", [("weather", '{"at": "Bern"}')]),
    (
        "hermes",
        'I look.\n<tool_call>{"arguments":{"a":"}{\\""},"name":"time"}</tool_call>\n<tool_call>{"name":"weather"}</tool_call>\n',
        "I look.",
        [("time", '{"a":"}{\\""}'), ("weather", "{}")],
    ),
    ("hermes", '<tool_call>{"name":"time","arguments":"{\\"a\\": 1}"}</tool_call>after', "after", [("time", '{"a": 1}')]),
    ("hermes", '<tool_call>{"name":"time","arguments":null}</tool_call>', "", [("time", "{}")]),
    ("hermes", '<tool_call>{"name":"time","arguments":{"a": [1, {', "", [("time", '{"a": [1, {')]),
    ("hermes", '<tool_call>{"name":"rm","arguments":{}}</tool_call>', '<tool_call>{"name":"rm","arguments":{}}</tool_call>', []),
    ("hermes", "a <tool_call> b", "a <tool_call> b", []),
    ("hermes", "1 < 2 <<tool_cal", "1 < 2 <<tool_cal", []),
    ("hermes", "line \n\n", "line \n\n", []),
    ("hermes", '<tool_call>{"name":"ti', '<tool_call>{"name":"ti', []),
    (
        "hermes",
        '<tool_call>{"name":"time","arguments":[1]}</tool_call>',
        '<tool_call>{"name":"time","arguments":[1]}</tool_call>',
        [],
    ),
    ("llama3", '{"name": "weather", "parameters": {"at": "Bern"}}', "", [("weather", '{"at": "Bern"}')]),
    (
        "llama3",
        ' {"type": "function", "name": "weather", "parameters": {}}; {"name": "time", "parameters": {"a": 1}}',
        "",
        [("weather", "{}"), ("time", '{"a": 1}')],
    ),
    ("llama3", '{"name": "weather", "age": 3}', '{"name": "weather", "age": 3}', []),
    ("llama3", 'See: {"name": "weather", "parameters": {}}', 'See: {"name": "weather", "parameters": {}}', []),
    (
        "mistral",
        '[TOOL_CALLS][{"name": "weather", "arguments": {"at": []}}, {"name": "time", "arguments": {}}]',
        "",
        [("weather", '{"at": []}'), ("time", "{}")],
    ),
    ("mistral", 'Wait. [TOOL_CALLS] [{"name": "time", "arguments": {}}] ', "Wait.", [("time", "{}")]),
    ("mistral", "[TOOL_CALLS] none", "[TOOL_CALLS] none", []),
    ("mistral", "[TOOL_CALLS][", "[TOOL_CALLS][", []),
]


@pytest.mark.parametrize(("form", "text", "content", "calls"), CASES)
def test_calls_and_content_are_found_whole_and_by_character(
    form: ToolFormat, text: str, content: str, calls: list[tuple[str, str]]
) -> None:
    assert parse(form, [text]) == (content, calls)
    assert parse(form, text) == (content, calls)


D31, BEGIN, END = "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
XML = "<tool_call>\n<function=weather>\n"
FAMILY_CASES: list[tuple[ToolFormat, str, str, list[tuple[str, str]]]] = [
    (
        "qwen3_coder",
        f'I look.\n{XML}<parameter=text>\nthe "old"\ntown </parameter\n</parameter>\n<parameter=count>\n3\n</parameter>\n'
        "</function>\n</tool_call>\n",
        "I look.",
        [("weather", '{"text": "the \\"old\\"\\ntown </parameter", "count": 3}')],
    ),
    ("qwen3_coder", f"{XML}</function>\n</tool_call>", "", [("weather", "{}")]),
    (
        "qwen3_coder",  # a model that omits <tool_call>, and the ends of values
        "<function=weather>\n<parameter=text>\nBern\n<parameter=count>\nmany\n</function>",
        "",
        [("weather", '{"text": "Bern", "count": "many"}')],
    ),
    (
        "qwen3_coder",
        f"{XML}<parameter=either>null</parameter><parameter=flag>True</parameter><parameter=new>7</parameter></function></tool_call>",
        "",
        [("weather", '{"either": null, "flag": true, "new": "7"}')],
    ),
    ("qwen3_coder", f"{XML}<parameter=text>\nBe", "", [("weather", '{"text": "Be')]),
    ("qwen3_coder", "<tool_call>\n<function=rm>\n</function>", "<tool_call>\n<function=rm>\n</function>", []),
    ("qwen3_coder", "<tool_call>\n<func", "<tool_call>\n<func", []),
    (
        "glm45",
        "<tool_call>weather\n<arg_key>text</arg_key>\n<arg_value>12</arg_value>\n<arg_key>count</arg_key>"
        "<arg_value>12</arg_value></tool_call>",
        "",
        [("weather", '{"text": "12", "count": 12}')],
    ),
    ("glm45", "<tool_call>weather<arg_key>text</arg_key><arg_value>a</arg_value></tool_call>", "", [("weather", '{"text": "a"}')]),
    ("glm45", "<tool_call>time\n</tool_call> so", " so", [("time", "{}")]),
    (
        "deepseek_v3",
        f'Let me check.{D31}{BEGIN}function<｜tool▁sep｜>weather\n```json\n{{"at": "Bern"}}\n```{END}',
        "Let me check.",
        [("weather", '{"at": "Bern"}')],
    ),
    ("deepseek_v3", f"{D31}function<｜tool▁sep｜>weather", f"{D31}function<｜tool▁sep｜>weather", []),
    ("deepseek_v31", f'{D31}{BEGIN}time<｜tool▁sep｜>{{"a": {{"b": "}}"}}}}{END}', "", [("time", '{"a": {"b": "}"}}')]),
    ("deepseek_v31", f"{D31}{BEGIN}time<｜tool▁sep｜>[1]{END}", f"{D31}{BEGIN}time<｜tool▁sep｜>[1]{END}", []),
    ("mistral_v11", 'Hi [TOOL_CALLS]weather[ARGS]{"at": "Bern"}', "Hi", [("weather", '{"at": "Bern"}')]),
    (
        "mistral_v11",
        '[TOOL_CALLS]weather[CALL_ID]abcDEF123[ARGS]{"a": 1}[TOOL_CALLS]time{"b": 2}',
        "",
        [("weather", '{"a": 1}'), ("time", '{"b": 2}')],
    ),
    ("granite", '<tool_call> [{"name": "time", "arguments": {}}]', "", [("time", "{}")]),
    ("granite", '<|tool_call|> [\n  {"arguments": {"a": 1}, "name": "time"}\n]', "", [("time", '{"a": 1}')]),
    ("granite", '<|tool_call|> {"name": "time"}', '<|tool_call|> {"name": "time"}', []),
    ("phi4_mini_json", 'functools[{"name": "time", "arguments": {"a": 1}}]', "", [("time", '{"a": 1}')]),
    (
        "kimi_k2",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.a.b:c-d:12<|tool_call_argument_begin|>{}<|tool_call_end|>",
        "",
        [("a.b:c-d", "{}")],
    ),
    (
        "pythonic",
        "[weather(at='Be\\'rn, (x)', count = -1, flag=True, many=[1, {\"k\": None}]), time()]",
        "",
        [("weather", '{"at": "Be\'rn, (x)", "count": -1, "flag": true, "many": [1, {"k": null}]}'), ("time", "{}")],
    ),
    ("pythonic", "[weather(at=today)]", "", [("weather", '{"at": ')]),
    ("pythonic", "[1, 2] are numbers", "[1, 2] are numbers", []),
    ("pythonic", "See [weather(at='Bern')]", "See [weather(at='Bern')]", []),
    ("llama4_pythonic", "Now. <|python_start|>[time(a=1)]<|python_end|>", "Now.", [("time", '{"a": 1}')]),
    ("llama4_pythonic", "[time(a=1)]", "", [("time", '{"a": 1}')]),
    ("gemma3", "Ok\n```tool_code\ntime(a=1)\nweather()\n```\nDone", "Ok\nDone", [("time", '{"a": 1}'), ("weather", "{}")]),
    ("gemma3", "```tool_code\nprint(1)\n```", "```tool_code\nprint(1)\n```", []),
    (
        "functiongemma",
        "<start_function_call>call:weather{text:<escape>San {x}<escape>count:<escape>42<escape>,inner:{a:[1,<escape>b<escape>]}}"
        "<end_function_call>",
        "",
        [("weather", '{"text": "San {x}", "count": 42, "inner": {"a": [1, "b"]}}')],
    ),
    ("functiongemma", "<start_function_call>call:rm{}<end_function_call>", "<start_function_call>call:rm{}<end_function_call>", []),
    (
        "gemma4",
        '<|tool_call>call:time{text:<|"|>a "b"<|"|>,flag:true}<tool_call|>',
        "",
        [("time", '{"text": "a \\"b\\"", "flag": true}')],
    ),
    (
        "minimax_m2",
        'Ok.\n<minimax:tool_call>\n<invoke name="weather">\n<parameter name="text">Seattle</parameter>\n'
        '<parameter name="count">5</parameter>\n</invoke>\n</minimax:tool_call>',
        "Ok.",
        [("weather", '{"text": "Seattle", "count": 5}')],
    ),
]


@pytest.mark.parametrize(("form", "text", "content", "calls"), FAMILY_CASES)
def test_examples_of_each_family(form: ToolFormat, text: str, content: str, calls: list[tuple[str, str]]) -> None:
    assert parse(form, [text]) == (content, calls)
    assert parse(form, text) == (content, calls)


CHANNELS: list[tuple[str, str, str, list[tuple[str, str]]]] = [
    (
        "<|channel|>analysis<|message|>The user asks.<|end|><|start|>assistant<|channel|>commentary to=functions.weather "
        '<|constrain|>json<|message|>{"at": "Bern"}<|call|>',
        "",
        "The user asks.",
        [("weather", '{"at": "Bern"}')],
    ),
    (
        "<|channel|>analysis<|message|>A<|end|><|start|>assistant<|channel|>final<|message|>1 < 2<|return|>",
        "1 < 2",
        "A",
        [],
    ),
    ("<|start|>assistant to=functions.time<|channel|>commentary json<|message|>{}<|call|>", "", "", [("time", "{}")]),
    (
        '<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>commentary to=functions.time<|message|>{"a": ',
        "I look.",
        "",
        [("time", '{"a": ')],
    ),
    (
        "<|channel|>commentary to=functions.rm<|message|>{}<|call|>",
        "<|channel|>commentary to=functions.rm<|message|>{}",
        "",
        [],
    ),
    ("plain <text>", "plain <text>", "", []),
    ("<|channel|>comm", "", "", []),
]


@pytest.mark.parametrize(("text", "content", "reasoning", "calls"), CHANNELS)
def test_channels_divide_reasoning_content_and_calls(text: str, content: str, reasoning: str, calls: list[tuple[str, str]]) -> None:
    assert parse_all("openai", [text]) == parse_all("openai", text) == (content, reasoning, calls)


CALL = '{"name": "weather", "arguments": {"a": 1}}'
TAGS = sorted({tag for family in FAMILIES.values() for tag in family.tags})
MARKS = [
    "<function=weather>",
    "<parameter=",
    "</parameter>",
    "</function>",
    "functools",
    "```tool_code",
    "```json",
    "call:",
    "weather(",
]
OTHERS = [
    "</tool_call>",
    CALL,
    '{"name":"time","parameters":{}}',
    '"name": "time"',
    '"arguments":',
    "weather",
    "to=functions.time",
    "a=1",
]
ANY = st.sampled_from([*TAGS, *MARKS, *OTHERS, *'[],; {}()"<x:\\', "\n", "null"])


def fragments(form: ToolFormat) -> st.SearchStrategy[str]:
    """Markers of the family mostly."""
    family = FAMILIES[form]
    own = [*family.tags, family.begin, family.list_begin, family.call_begin, family.call_end, family.separator, family.end]
    whole = write_calls(form, [("weather", {"text": "a"}), ("time", {})])
    return ANY | st.sampled_from([whole, whole[:-3], *(text for text in own if text)])


@settings(max_examples=examples(400), deadline=None)
@given(st.sampled_from(FORMS), st.data())
def test_any_division_of_a_text_gives_the_same_deltas(form: ToolFormat, data: st.DataObject) -> None:
    text = data.draw(st.lists(fragments(form), max_size=14).map("".join))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    parts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole = parse_all(form, [text])
    assert parse_all(form, parts) == whole
    if not whole[2] and form != "openai":
        assert whole[0] == text  # without a call nothing is lost


STRINGS = st.text(max_size=20) | st.sampled_from(["</x>", "{", "}", '"', "\\", "\n", "é漢🎉", "<|call|", "[1]", "null", "3", " a "])
KEYS = st.text(alphabet="abcdef_", min_size=1, max_size=4)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | STRINGS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=8,
)
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | STRINGS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=8,
)


def is_quoted_or_null(text: str) -> bool:
    """Without quotes around it, such a text is read as JSON where a string or null is allowed."""
    try:
        return isinstance(json.loads(text.strip()), str | None)
    except ValueError:
        return False


TYPED = st.fixed_dictionaries(
    {},
    optional={
        "text": STRINGS,
        "at": st.sampled_from(["Bern", "Rome"]),
        "count": st.integers(),
        "share": st.floats(allow_nan=False, allow_infinity=False),
        "flag": st.booleans(),
        "many": st.lists(PLAIN, max_size=3),
        "inner": st.dictionaries(KEYS, PLAIN, max_size=3),
        "either": st.none() | STRINGS.filter(lambda text: not is_quoted_or_null(text)),
    },
)


def ends_of_values(form: ToolFormat) -> list[str]:
    """Return the texts that end a value wherever they are: no template escapes them in a value."""
    match FAMILIES[form].style:
        case Channels():
            return list(FAMILIES[form].tags)
        case NamedCall(arguments=TaggedArguments() as tags):
            return [tags.value_end.strip(), *([tags.key_begin, tags.end] if tags.is_end_optional else [])]
        case NamedCall(arguments=BareArguments(quote=quote)):
            return [quote]
        case _:
            return []


def can_be_written(form: ToolFormat, arguments: dict[str, Any]) -> bool:
    written = json.dumps(arguments, ensure_ascii=False)
    return not any(json.dumps(end, ensure_ascii=False)[1:-1] in written for end in ends_of_values(form))


@settings(max_examples=examples(200), deadline=None)
@given(st.sampled_from(FORMS), st.data())
def test_written_calls_are_read_as_they_were_written(form: ToolFormat, data: st.DataObject) -> None:
    style = FAMILIES[form].style
    is_json = not isinstance(style, NamedCall) or isinstance(style.arguments, JsonArguments)
    arguments = (st.dictionaries(st.text(), JSON) if is_json else TYPED).filter(partial(can_be_written, form))
    calls = data.draw(st.lists(st.tuples(st.sampled_from(["weather", "time"]), arguments), min_size=1, max_size=3))
    text = write_calls(form, calls)
    content, found = parse(form, [text])
    assert content == ""
    assert [(name, json.loads(arguments)) for name, arguments in found] == calls
    assert parse(form, text) == (content, found)
    assert parse(form, [text], parallel=False)[1] == found[:1]
