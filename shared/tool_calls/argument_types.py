"""The JSON types of a tool's arguments, by its schema.

Families that write arguments as text between tags have no quotes around strings, so only the schema
distinguishes the string "3" from the number. The parser of the gateway and the grammar of the
engine have to agree on it.
"""

from __future__ import annotations

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
        return _types(resolve(reference, root), root, depth - 1)
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


def resolve(reference: str, root: Mapping[str, Any]) -> Any:
    """Return the schema that a `$ref` names; None if there is none."""
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


def is_json_of(text: str, types: frozenset[str]) -> bool:
    """True if `text` is JSON of one of the types."""
    try:
        kind = json_type(json.loads(text, parse_constant=refuse_constant))
    except (ValueError, RecursionError):
        return False
    return kind in types or (kind in ("integer", "number") and bool(types & {"integer", "number"}))


def refuse_constant(constant: str) -> None:
    """Raise `ValueError` for NaN and Infinity, which Python's parser accepts."""
    raise ValueError(constant)
