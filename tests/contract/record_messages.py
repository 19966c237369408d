"""Record examples of every message.

Run `python -m tests.contract.record_messages v0.1` once per release, from its sources.
test_upgrades.py checks that later versions can read the recorded messages (map, invariant 10).
"""

from __future__ import annotations

import importlib
import json
import pkgutil
import sys
import types
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

import shared.contracts
from shared.contracts.base import Message, Request
from shared.contracts.keys import ApiKey
from shared.contracts.models import ModelCard

DIRECTORY = Path(__file__).parent / "messages"
STORED: tuple[type[BaseModel], ...] = (ModelCard, ApiKey)
"""Values stored in JetStream, which survive an upgrade there."""
_BASES = (Message, Request)
_PARTICULAR: dict[str, dict[str, Any]] = {
    "ModelSpec": {"engine": "vllm", "command": [], "health": "/health", "routes": ["/v1/rerank"]},
    "ContainerOptions": {"mounts": ["/models:/models"]},
    "InferResponse": {"status": 200},
    "SocketAttach": {"weights_id": "w", "source": None},
}
"""Fields that do not accept every value of their type."""


def messages() -> dict[str, type[BaseModel]]:
    """Return every message of the contracts, and STORED, by name."""
    for module in pkgutil.iter_modules(shared.contracts.__path__):
        importlib.import_module(f"shared.contracts.{module.name}")
    return {kind.__name__: kind for kind in (*_children(Message), *STORED) if kind not in _BASES}


def _children(kind: type[BaseModel]) -> Iterator[type[BaseModel]]:
    for child in kind.__subclasses__():
        if child.__module__.startswith("shared.contracts."):
            yield child
        yield from _children(child)


def example(kind: type[BaseModel], *, full: bool) -> dict[str, Any]:
    """Build a message with all fields, or with the required ones only."""
    fields = {name: field for name, field in kind.model_fields.items() if full or field.is_required()}
    made = {name: _value(field.annotation, field, name) for name, field in fields.items()}
    return made | {name: value for name, value in _PARTICULAR.get(kind.__name__, {}).items() if name in kind.model_fields}


def _value(annotation: Any, field: FieldInfo, name: str) -> Any:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _value(arguments[0], field, name)
    if origin is Literal:
        return arguments[0]
    if origin in (Union, types.UnionType):
        return _value(next(a for a in arguments if a is not type(None)), field, name)
    if origin in (tuple, list, frozenset, set):
        return [_value(arguments[0], field, name)]
    if origin is dict:
        return {_value(arguments[0], field, "key"): _value(arguments[1], field, name)}
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return example(annotation, full=True)
    return _scalar(annotation, field, name)


def _scalar(annotation: Any, field: FieldInfo, name: str) -> Any:
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return next(iter(annotation)).value
    if annotation is bool:
        return True
    if annotation in (int, float):
        return annotation(0.5) if annotation is float and _top(field) <= 1 else annotation(1)
    return f"{name}-1" if annotation is str else {"any": [1, "two", None]}


def _top(field: FieldInfo) -> float:
    """Return the upper bound, if there is one."""
    found = (getattr(m, "le", None) or getattr(m, "lt", None) for m in field.metadata)
    return next((float(bound) for bound in found if bound is not None), float("inf"))


def record(version: str) -> None:
    directory = DIRECTORY / version
    directory.mkdir(parents=True, exist_ok=True)
    for name, kind in sorted(messages().items()):
        sent = [kind.model_validate(example(kind, full=full)).model_dump(mode="json") for full in (False, True)]
        text = json.dumps(sent, indent=1, sort_keys=True, ensure_ascii=False)
        (directory / f"{name}.json").write_text(text + "\n")


if __name__ == "__main__":
    record(sys.argv[1])
