"""Tool calls in text: any division of a text gives the same deltas; the rest is content."""

from __future__ import annotations

import json
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.domain.tool_calls import Arguments, CallStarted, Piece, Text, ToolCallParser
from shared.contracts.engines import ToolFormat

NAMES = frozenset({"weather", "time"})
FORMS: list[ToolFormat] = ["hermes", "llama3", "mistral"]


def parse(form: ToolFormat, parts: Iterable[str], *, parallel: bool = True) -> tuple[str, list[tuple[str, str]]]:
    """Return the content, and the calls with their arguments."""
    parser = ToolCallParser(form, NAMES, parallel=parallel)
    pieces: list[Piece] = [piece for part in parts for piece in parser.feed(part)] + parser.finish()
    content, calls = "", list[tuple[str, str]]()
    for piece in pieces:
        match piece:
            case Text(text=text):
                content += text
            case CallStarted(call=call, name=name):
                assert call == len(calls)
                calls.append((name, ""))
            case Arguments(call=call, text=text):
                assert call == len(calls) - 1
                calls[-1] = (calls[-1][0], calls[-1][1] + text)
    return content, calls


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


CALL = '{"name": "weather", "arguments": {"a": 1}}'
TAGS = ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", CALL, '{"name":"time","parameters":{}}', '"name": "time"', '"arguments":']
FRAGMENTS = st.sampled_from([*TAGS, *'[],; {}"<x:\\', "\n", "null"])


@given(st.sampled_from(FORMS), st.lists(FRAGMENTS, max_size=14).map("".join), st.data())
def test_any_division_of_a_text_gives_the_same_deltas(form: ToolFormat, text: str, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    parts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole = parse(form, [text])
    assert parse(form, parts) == whole
    if not whole[1]:
        assert whole[0] == text  # without a call nothing is lost


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=8,
)


@given(
    st.sampled_from(FORMS),
    st.lists(st.tuples(st.sampled_from(sorted(NAMES)), st.dictionaries(st.text(), JSON)), min_size=1, max_size=3),
)
def test_written_calls_are_read_as_they_were_written(form: ToolFormat, calls: list[tuple[str, dict[str, object]]]) -> None:
    key = "parameters" if form == "llama3" else "arguments"
    written = [json.dumps({"name": name, key: arguments}) for name, arguments in calls]
    text = {
        "hermes": "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in written),
        "llama3": "; ".join(written),
        "mistral": f"[TOOL_CALLS][{', '.join(written)}]",
    }[form]
    content, found = parse(form, [text])
    assert content == ""
    assert [(name, json.loads(arguments)) for name, arguments in found] == calls
    assert parse(form, [text], parallel=False)[1] == found[:1]
