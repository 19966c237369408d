"""Examples of tool calls from the tests of other engines are read, however they are divided."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from typing import Any

import pytest

from services.gateway.domain.tool_calls.parser import ToolCallParser
from services.gateway.domain.tool_calls.pieces import Arguments, CallStarted, Piece, Reasoning, Text
from shared.contracts.engines import ToolFormat
from shared.tool_calls.families import FAMILIES
from tests.unit.gateway.tool_call_examples import CASES, K_BEGIN, K_END, ROME, TOOLS, Call, kimi


def parse(form: ToolFormat, parts: Iterable[str], tools: dict[str, dict[str, Any]] = TOOLS) -> tuple[str, list[tuple[str, str]]]:
    """Return the content, and the calls with their arguments."""
    parser = ToolCallParser(form, tools)
    pieces: list[Piece] = [piece for part in parts for piece in parser.feed(part)] + parser.finish()
    content, calls = "", list[tuple[str, str]]()
    for piece in pieces:
        match piece:
            case Text(text=text):
                content += text
            case CallStarted(name=name):
                calls.append((name, ""))
            case Arguments(text=text):
                calls[-1] = (calls[-1][0], calls[-1][1] + text)
            case Reasoning():
                pass
    return content, calls


def divide(text: str, rng: random.Random) -> list[str]:
    """Divide a text at up to eight places, as the tokens of several steps arrive together."""
    cuts = sorted(rng.randrange(len(text) + 1) for _ in range(rng.randrange(9)))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@pytest.mark.parametrize(("form", "text", "content", "calls"), CASES)
def test_examples_of_other_engines_are_read(form: ToolFormat, text: str, content: str, calls: list[Call]) -> None:
    found_content, found = parse(form, [text])
    values = [
        (name, arguments if isinstance(wanted[1], str) else json.loads(arguments))
        for (name, arguments), wanted in zip(found, calls, strict=True)
    ]
    assert (found_content, values) == (content, calls)
    rng = random.Random(text)
    for parts in ([*text], *(divide(text, rng) for _ in range(25))):
        assert parse(form, parts) == (found_content, found)


def test_every_family_has_examples() -> None:
    assert {form for form, *_ in CASES} == set(FAMILIES)


def test_kimi_may_omit_the_name_of_the_only_tool() -> None:
    text = f"{K_BEGIN}{kimi('0', ROME)}{K_END}"
    assert parse("kimi_k2", text, {"forecast": TOOLS["forecast"]}) == ("", [("forecast", ROME)])
    assert parse("kimi_k2", text) == (text, [])
