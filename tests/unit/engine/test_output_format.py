"""Demands on the output, read from requests: what is understood, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from services.engine.domain.output_format import (
    MAX_CHARS,
    MAX_DEPTH,
    MAX_MEMBERS,
    OutputFormat,
    is_constrained,
    read_output_format,
)
from shared.errors import InvalidRequest, UnsupportedParameter

SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"type": "string"}}}
TEXT = json.dumps(SCHEMA)


def of_type(kind: str, **fields: Any) -> dict[str, Any]:
    return {"response_format": {"type": kind, **fields}}


@pytest.mark.parametrize(
    ("body", "wanted"),
    [
        ({}, None),
        ({"response_format": None, "guided_json": None}, None),
        (of_type("text"), None),
        (of_type("json_object"), OutputFormat("json_schema", '{"type": "object"}', "response_format")),
        (of_type("json_object", schema=SCHEMA), OutputFormat("json_schema", TEXT, "response_format")),
        (
            of_type("json_schema", json_schema={"name": "n", "schema": SCHEMA}),
            OutputFormat("json_schema", TEXT, "response_format"),
        ),
        ({"guided_json": TEXT}, OutputFormat("json_schema", TEXT, "guided_json")),
        ({"guided_regex": "a+"}, OutputFormat("regex", "a+", "guided_regex")),
        ({"guided_choice": ["a", 'b"']}, OutputFormat("grammar", 'start: "a" | "b\\""', "guided_choice")),
        ({"guided_grammar": "start: /a/"}, OutputFormat("grammar", "start: /a/", "guided_grammar")),
        ({"structured_outputs": {"regex": "a", "json": None}}, OutputFormat("regex", "a", "structured_outputs")),
        (
            {"structured_outputs": {"json_object": True, "disable_any_whitespace": True}},
            OutputFormat("json_schema", '{"type": "object"}', "structured_outputs", is_compact=True),
        ),
    ],
)
def test_each_kind_of_demand_is_read(body: dict[str, Any], wanted: OutputFormat | None) -> None:
    assert read_output_format(body) == wanted
    assert is_constrained({"model": "m", **body}) == (wanted is not None)


def nested(levels: int) -> Any:
    value: Any = {}
    for _ in range(levels):
        value = [value]
    return {"enum": value}


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"response_format": "json"}, "object with a type"),
        ({"response_format": {"type": 3}}, "object with a type"),
        (of_type("json_schema"), "schema is missing"),
        (of_type("json_schema", json_schema={"schema": 3}), "must be an object"),
        (of_type("json_schema", json_schema={"schema": nested(MAX_DEPTH)}), "nested"),
        (of_type("json_schema", json_schema={"schema": {"properties": {f"p{i}": {} for i in range(MAX_MEMBERS + 1)}}}), "members"),
        (of_type("json_schema", json_schema={"schema": {"const": "x" * MAX_CHARS}}), "characters"),
        ({"guided_json": "{"}, "not JSON"),
        ({"guided_json": "[" * 100_000}, "not JSON"),
        ({"guided_regex": ""}, "not empty"),
        ({"guided_regex": "a" * (MAX_CHARS + 1)}, "characters"),
        ({"guided_choice": []}, "list of texts"),
        ({"guided_choice": ["a", 1]}, "list of texts"),
        ({"guided_choice": ["a"] * 10_001}, "choices"),
        ({"structured_outputs": []}, "must be an object"),
        ({"structured_outputs": {}}, "needs one of"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "needs one of"),
        ({"guided_regex": "a", **of_type("json_object")}, "exclude each other"),
    ],
)
def test_malformed_and_oversized_demands_are_refused(body: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidRequest, match=text) as refused:
        read_output_format(body)
    assert refused.value.param in body


@pytest.mark.parametrize("body", [of_type("structural_tag"), {"structured_outputs": {"json": {}, "whitespace_pattern": " "}}])
def test_unknown_kinds_are_refused_as_unsupported(body: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedParameter):
        read_output_format(body)
