"""Read what a request demands of its output: JSON, a regular expression, a choice, or a grammar.

OpenAI's `response_format`, and vLLM's `structured_outputs` and `guided_*`. Malformed and oversized
demands are refused here, before the library compiles them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from shared.errors import InvalidRequest, UnsupportedParameter

_RESPONSE_FORMAT, _STRUCTURED = "response_format", "structured_outputs"
_GUIDED: dict[str, str] = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}
FIELDS = frozenset({_RESPONSE_FORMAT, _STRUCTURED, *_GUIDED})
"""Fields of a request that constrain its output."""
MAX_CHARS = 128 * 1024
"""Most characters of a schema, regular expression or grammar. OpenAI allows 120,000 in the names
and values of a schema.
"""
MAX_DEPTH = 64
"""Most nested objects and arrays of a schema. A nested property takes two."""
MAX_MEMBERS = 1000
"""Most members of one object of a schema. The library's time grows with their square: 1,000
optional properties take about 0.1 s.
"""
MAX_CHOICES = 10_000
_TEXT = {"type": "text"}
_JSON_OBJECT = '{"type":"object"}'

Kind = Literal["json_schema", "regex", "grammar"]


@dataclass(frozen=True)
class OutputFormat:
    """The language of a response.

    Attributes:
        kind: How `text` is written.
        text: A JSON schema, a regular expression, or a grammar (Lark or GBNF).
        param: The field of the request, for errors.
        is_compact: No white space between the tokens of JSON.
    """

    kind: Kind
    text: str
    param: str
    is_compact: bool = False


def is_constrained(body: Mapping[str, Any]) -> bool:
    """True if the body of a request may constrain its output. Cheap."""
    return any(body.get(name) not in (None, _TEXT) for name in FIELDS)


def read_output_format(body: Mapping[str, Any]) -> OutputFormat | None:
    """Return what `body` demands of the output; None: any text.

    Raises:
        InvalidRequest: The demand is malformed, or over a limit.
        UnsupportedParameter: A kind of demand that the engine does not know.
    """
    found = [wanted for name in sorted(FIELDS & body.keys()) if (wanted := _read_field(name, body[name])) is not None]
    if len(found) > 1:
        names = " and ".join(wanted.param for wanted in found)
        raise InvalidRequest(f"{names} exclude each other. Send only one of them", param=found[-1].param)
    return found[0] if found else None


def _read_field(name: str, value: Any) -> OutputFormat | None:
    if value is None:
        return None
    if name == _RESPONSE_FORMAT:
        return _read_response_format(value)
    if name == _STRUCTURED:
        return _read_structured(value)
    return _read_kind(_GUIDED[name], value, name)


def _read_response_format(value: Any) -> OutputFormat | None:
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "text":
        return None
    if kind == "json_object":  # llama.cpp's server takes a schema here
        return schema_format(value.get("schema", _JSON_OBJECT), _RESPONSE_FORMAT)
    if kind == "json_schema":
        inner = value.get("json_schema")
        if not isinstance(inner, dict) or inner.get("schema") is None:
            raise InvalidRequest("response_format.json_schema.schema is missing", param=_RESPONSE_FORMAT)
        return schema_format(inner["schema"], _RESPONSE_FORMAT)
    if isinstance(kind, str):
        raise UnsupportedParameter(
            f"response_format of type {kind[:40]!r} is not supported by this engine. Use text, json_object or json_schema",
            param=_RESPONSE_FORMAT,
        )
    raise InvalidRequest("response_format must be an object with a type", param=_RESPONSE_FORMAT)


def _read_structured(value: Any) -> OutputFormat | None:
    if not isinstance(value, dict):
        raise InvalidRequest("structured_outputs must be an object", param=_STRUCTURED)
    given = {k: v for k, v in value.items() if v is not None and v is not False}
    is_compact = given.pop("disable_any_whitespace", False) is True
    kinds = given.keys() & {"json", "json_object", "regex", "choice", "grammar"}
    if unknown := given.keys() - kinds:
        raise UnsupportedParameter(
            f"structured_outputs.{min(unknown)[:40]} is not supported by this engine. Omit it", param=_STRUCTURED
        )
    if len(kinds) != 1:
        raise InvalidRequest("structured_outputs needs one of json, json_object, regex, choice and grammar", param=_STRUCTURED)
    (kind,) = kinds
    return _read_kind(kind, given[kind], _STRUCTURED, is_compact=is_compact)


def _read_kind(kind: str, value: Any, param: str, *, is_compact: bool = False) -> OutputFormat:
    match kind:
        case "json":
            return schema_format(value, param, is_compact=is_compact)
        case "json_object":
            return schema_format(_JSON_OBJECT, param, is_compact=is_compact)
        case "choice":
            return _choice(value, param)
        case _:
            if not isinstance(value, str) or not value:
                raise InvalidRequest(f"{param}: {kind} must be a text that is not empty", param=param)
            return OutputFormat("regex" if kind == "regex" else "grammar", limit_chars(value, param), param)


def _choice(value: Any, param: str) -> OutputFormat:
    if not isinstance(value, list) or not value or not all(isinstance(item, str) and item for item in value):
        raise InvalidRequest(f"{param}: choice must be a list of texts that are not empty", param=param)
    if len(value) > MAX_CHOICES:
        raise InvalidRequest(f"{param} has {len(value)} choices, and the limit is {MAX_CHOICES}", param=param)
    return OutputFormat("grammar", limit_chars("start: " + " | ".join(json.dumps(item) for item in value), param), param)


def schema_format(value: Any, param: str, *, is_compact: bool = False) -> OutputFormat:
    """A JSON schema, as an object or as text. Its properties keep their order."""
    if isinstance(value, str):
        try:
            value = json.loads(limit_chars(value, param))
        except (ValueError, RecursionError) as e:
            raise InvalidRequest(f"The schema in {param} is not JSON", param=param) from e
    if not isinstance(value, dict):
        raise InvalidRequest(f"The schema in {param} must be an object", param=param)
    check_schema_size(value, param)
    return OutputFormat("json_schema", limit_chars(json.dumps(value, ensure_ascii=False), param), param, is_compact)


def check_schema_size(schema: Any, param: str) -> None:
    """Raise `InvalidRequest` for a schema that is nested too deep, or with too large an object."""
    level: list[Any] = [schema]
    depth = 0
    while level := [node for node in level if isinstance(node, dict | list)]:
        if depth >= MAX_DEPTH:
            raise InvalidRequest(f"The schema in {param} has more than {MAX_DEPTH} nested objects and arrays", param=param)
        if any(isinstance(node, dict) and len(node) > MAX_MEMBERS for node in level):
            raise InvalidRequest(f"An object of the schema in {param} has more than {MAX_MEMBERS} members", param=param)
        level = [child for node in level for child in (node.values() if isinstance(node, dict) else node)]
        depth += 1


def limit_chars(text: str, param: str) -> str:
    """Return `text`. Raises `InvalidRequest` if it is over the limit."""
    if len(text) > MAX_CHARS:
        raise InvalidRequest(f"{param} has {len(text)} characters, and the limit is {MAX_CHARS}", param=param)
    return text
