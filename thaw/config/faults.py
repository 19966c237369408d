"""Faults of thaw.yaml: where, what was given, what is allowed."""

from __future__ import annotations

import difflib
import pathlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel
from pydantic_core import ErrorDetails

from thaw.errors import CommandError

Path = tuple[str | int, ...]
EXAMPLE = pathlib.Path(__file__).parents[1] / "thaw.example.yaml"
"""Every key of a thaw.yaml, explained; part of the wheel."""
_SECRETS = frozenset({"admin_key", "api_keys", "env", "environment"})
"""Keys whose values may be credentials: messages do not show them."""


def format_path(path: Sequence[str | int]) -> str:
    """("models", 1, "keep_alive") as models[1].keep_alive."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else (f".{part}" if text else part)
    return text


@dataclass(frozen=True, order=True)
class Fault:
    """A fault of the configuration file.

    Attributes:
        line: Counted from 1; 0: the whole file.
        column: Counted from 1; 0: the whole file.
        path: The keys that lead to the faulty value.
    """

    line: int
    column: int
    path: Path
    message: str

    def text(self, file: str) -> str:
        place = f"{file}:{self.line}:{self.column}" if self.line else file
        where = format_path(self.path)
        return f"{place}: {where}: {self.message}" if where else f"{place}: {self.message}"


class ConfigError(CommandError):
    """Every fault of one file."""

    def __init__(self, file: str, faults: Iterable[Fault], remedy: str = "") -> None:
        self.file = file
        self.faults = tuple(sorted(set(faults), key=lambda f: (f.line, f.column, format_path(f.path), f.message)))
        count = len(self.faults)
        super().__init__(
            f"{file} has {count} fault{'s' if count != 1 else ''}; nothing was started or changed.",
            remedy or f"Correct them; {EXAMPLE} shows every key.",
            code="invalid_config",
            details=[
                {"file": file, "line": f.line, "column": f.column, "path": format_path(f.path), "message": f.message}
                for f in self.faults
            ],
        )

    def lines(self) -> list[str]:
        return [fault.text(self.file) for fault in self.faults]


def unknown_key(key: str, allowed: Iterable[str]) -> str:
    """The message for a key that is not known, with the nearest one that is."""
    names = sorted(allowed)
    near = difflib.get_close_matches(key, names, n=1, cutoff=0.6)
    if near:
        return f"unknown key; did you mean {near[0]!r}?"
    return f"unknown key; allowed are {', '.join(names)}"


def message_of(error: ErrorDetails, schema: type[BaseModel]) -> str:
    """A pydantic error in our words: what was given and what is allowed."""
    kind, context, given = error["type"], error.get("ctx", {}), error["input"]
    shown = "" if _SECRETS.intersection(map(str, error["loc"])) else f"given {_format_value(given)}; "
    if kind == "extra_forbidden":
        return unknown_key(str(error["loc"][-1]), _fields_at(schema, error["loc"][:-1]))
    if kind == "missing":
        return "is required"
    if kind == "value_error" and isinstance(given, dict | BaseModel):
        return _strip_prefix(error["msg"])  # about several keys; their values are not shown, since they may be credentials
    if kind == "value_error":
        return f"{shown}{_strip_prefix(error['msg'])}"
    allowed = _describe_bound(kind, context) or _strip_prefix(error["msg"])
    return f"{shown}allowed: {allowed}"


_BOUNDS = {
    "greater_than": "more than {gt}",
    "greater_than_equal": "{ge} or more",
    "less_than": "less than {lt}",
    "less_than_equal": "{le} or less",
    "literal_error": "{expected}",
    "string_pattern_mismatch": "text matching {pattern}",
    "string_too_short": "text of {min_length} characters or more",
    "bool_parsing": "true or false",
    "bool_type": "true or false",
    "int_parsing": "a whole number",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_parsing": "a number",
    "float_type": "a number",
    "finite_number": "a number that is finite",
    "string_type": "text (put it in quotes if it looks like a number)",
    "tuple_type": "a list",
    "list_type": "a list",
    "dict_type": "a mapping",
    "model_type": "a mapping",
    "model_attributes_type": "a mapping",
}


def _describe_bound(kind: str, context: dict[str, Any]) -> str | None:
    template = _BOUNDS.get(kind)
    return None if template is None else template.format(**context)


def _strip_prefix(message: str) -> str:
    return message.removeprefix("Value error, ")


def _format_value(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}…"


def _fields_at(schema: type[BaseModel], path: Sequence[str | int]) -> list[str]:
    """The keys that `schema` allows at `path`."""
    current: type[BaseModel] | None = schema
    for part in path:
        field = current.model_fields.get(str(part)) if current else None
        annotation = field.annotation if field else None
        current = annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None
    return list(current.model_fields) if current else []
