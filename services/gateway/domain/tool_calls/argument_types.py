"""Convert the text of an argument to JSON, by the types that its schema allows."""

from __future__ import annotations

import ast
import json

from shared.tool_calls.argument_types import is_json_of, refuse_constant


def text_to_json(text: str, types: frozenset[str]) -> str:
    """Return the JSON of an argument that was written without quotes.

    JSON and literals of Python are recognised; what is none of the types becomes a string.
    """
    stripped = text.strip()
    if is_json_of(stripped, types):
        return stripped
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
        json.loads(text, parse_constant=refuse_constant)
    except (ValueError, RecursionError):
        try:
            return json.dumps(ast.literal_eval(text), ensure_ascii=False, allow_nan=False)
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError) as e:
            raise ValueError("not a literal") from e
    return text


def quote_part(text: str) -> str:
    """Return `text` as a part of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]
