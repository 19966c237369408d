"""Faults of the simulator's files: the key, and the one that was probably meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

_SHOWN = 3


def faults(schema: type[BaseModel], error: ValidationError) -> str:
    """Return the faults of a file as one sentence, unknown keys first.

    A key that is missing because it is mistyped is no fault of its own, nor is a list that
    lacks the entry with the fault.
    """
    found = error.errors()
    unknown = {
        e["loc"]: _find_near(str(e["loc"][-1]), _keys_at(schema, e["loc"][:-1])) for e in found if e["type"] == "extra_forbidden"
    }
    meant = {(*where[:-1], near) for where, near in unknown.items()}
    above: set[tuple[str | int, ...]] = {where[:n] for where in (*unknown, *(e["loc"] for e in found)) for n in range(len(where))}
    rest = [e for e in found if e["loc"] not in {*unknown, *above, *meant}]
    texts = [_describe_unknown_key(schema, where, near) for where, near in unknown.items()] + [_describe_other(e) for e in rest]
    more = f"; and {len(texts) - _SHOWN} more" if len(texts) > _SHOWN else ""
    return "; ".join(texts[:_SHOWN]) + more


def _find_near(key: str, allowed: Iterable[str]) -> str | None:
    return next(iter(difflib.get_close_matches(key, sorted(allowed), n=1)), None)


def _describe_unknown_key(schema: type[BaseModel], where: tuple[str | int, ...], near: str | None) -> str:
    if near is not None:
        return f"{_join_path(where)}: unknown key; did you mean {near}?"
    return f"{_join_path(where)}: unknown key; allowed are {', '.join(sorted(_keys_at(schema, where[:-1])))}"


def _describe_other(error: ErrorDetails) -> str:
    if error["type"] == "missing":
        return f"{_join_path(error['loc'])}: this key is required"
    if error["type"] == "model_type":
        return f"{_join_path(error['loc'])}: must be a mapping of keys to values"
    return f"{_join_path(error['loc'])}: {error['msg'].removeprefix('Value error, ')}"


def _join_path(where: tuple[str | int, ...]) -> str:
    return ".".join(map(str, where)) or "the file"


def _keys_at(schema: type[BaseModel], where: tuple[str | int, ...]) -> set[str]:
    """Return the keys that the schema allows there.

    Args:
        schema: The schema of the file.
        where: The path of a value, which may have the tag of a union.
    """
    at = [schema]
    for part in where:
        if isinstance(part, int):
            continue
        below = [m for a in at if part in a.model_fields for m in _models(a.model_fields[part].annotation)]
        at = below or [a for a in at if "kind" in a.model_fields and a.model_fields["kind"].default == part] or at
    return {key for a in at for key in a.model_fields}


def _models(annotation: Any) -> list[type[BaseModel]]:
    """Return the models in a field's annotation, as in `tuple[NodeGroup, ...]` or a union."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in get_args(annotation) for model in _models(part)]
