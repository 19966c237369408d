"""Convert the text of an argument to JSON, by the types that its schema allows.

Families that write arguments as text between tags have no quotes around strings, so only the schema
distinguishes the string "3" from the number.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from typing import Any

_MAX_DEPTH = 8
_STRING = frozenset({"string"})
ANY = frozenset({"string", "number", "integer", "boolean", "null", "object", "array"})


def types_of(schema: Mapping[str, Any], name: str) -> frozenset[str]:
    """Return the JSON types that the schema of a tool's arguments allows for the argument `name`.

    An argument that the schema does not describe is a string.
    """
    properties = schema.get("properties")
    found = properties.get(name) if isinstance(properties, Mapping) else None
    return _types(found, schema, _MAX_DEPTH) if isinstance(found, Mapping) else _STRING


def _types(schema: Any, root: Mapping[str, Any], depth: int) -> frozenset[str]:
    if not isinstance(schema, Mapping) or depth == 0:
        return ANY
    if isinstance(reference := schema.get("$ref"), str):
        return _types(_resolve(reference, root), root, depth - 1)
    if isinstance(kind := schema.get("type"), str):
        return frozenset({kind})
    if isinstance(kind, list):
        return frozenset(each for each in kind if isinstance(each, str))
    if "const" in schema:
        return frozenset({json_type(schema["const"])})
    if isinstance(values := schema.get("enum"), list):
        return frozenset(json_type(value) for value in values)
    for key in ("anyOf", "oneOf"):
        if isinstance(choices := schema.get(key), list) and len(choices) <= 32:
            return frozenset().union(*(_types(choice, root, depth // 2) for choice in choices))
    return ANY


def _resolve(reference: str, root: Mapping[str, Any]) -> Any:
    found: Any = root
    for part in reference.removeprefix("#/").split("/"):
        found = found.get(part) if isinstance(found, Mapping) else None
    return found


def json_type(value: object) -> str:
    """Return the JSON type of a value."""
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "number"
        case str():
            return "string"
        case list():
            return "array"
        case _:
            return "object"


def is_text(types: frozenset[str]) -> bool:
    """True if the argument is a string whatever its text is."""
    return types == _STRING


def text_to_json(text: str, types: frozenset[str]) -> str:
    """Return the JSON of an argument that was written without quotes.

    JSON and literals of Python are recognised; what is none of the types becomes a string.
    """
    stripped = text.strip()
    try:
        value = json.loads(stripped, parse_constant=_refuse)
        kind = json_type(value)
        if kind in types or (kind in ("integer", "number") and types & {"integer", "number"}):
            return stripped
    except (ValueError, RecursionError):
        pass
    if "string" in types:
        return json.dumps(text, ensure_ascii=False)
    for written in (stripped, _unescape(stripped)):
        try:
            return literal_to_json(written)
        except ValueError:
            continue
    return json.dumps(text, ensure_ascii=False)


def _unescape(text: str) -> str:
    """Return JSON whose quotes a model escaped, as GLM 4.6 does for arrays."""
    try:
        found = json.loads(f'"{text}"')
    except ValueError:
        return ""
    return found if isinstance(found, str) else ""


def literal_to_json(text: str) -> str:
    """Return the JSON of a literal of Python or JSON. Raises `ValueError` if it is none."""
    try:
        json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        try:
            return json.dumps(ast.literal_eval(text), ensure_ascii=False, allow_nan=False)
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError) as e:
            raise ValueError("not a literal") from e
    return text


def quote_part(text: str) -> str:
    """Return `text` as a part of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _refuse(constant: str) -> None:
    raise ValueError(constant)
