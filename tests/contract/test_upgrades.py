"""A service reads the messages of the previous minor version (map, invariant 10).

messages/ holds them as that version wrote them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shared.contracts.models import ModelCard
from tests.contract.record_messages import DIRECTORY, example, messages

RECORDED = sorted(DIRECTORY.glob("v*/*.json"))
KINDS = messages()


def contains(now: Any, then: Any) -> bool:
    """True if a parsed message has every recorded field with its value."""
    if isinstance(then, dict) and isinstance(now, dict):
        return all(key in now and contains(now[key], value) for key, value in then.items())
    if isinstance(then, list) and isinstance(now, list):
        return len(now) == len(then) and all(contains(a, b) for a, b in zip(now, then, strict=True))
    return bool(now == then)


def test_messages_of_the_previous_version_are_here() -> None:
    assert len(RECORDED) >= 50


@pytest.mark.parametrize("file", RECORDED, ids=lambda f: f"{f.parent.name}-{f.stem}")
def test_a_message_of_the_previous_version_is_understood(file: Path) -> None:
    kind = KINDS[file.stem]
    for message in json.loads(file.read_text()):
        read = kind.model_validate_json(json.dumps(message)).model_dump(mode="json")
        assert contains(read, message), f"{json.dumps(message)}\nis read as\n{json.dumps(read)}"


def test_a_card_of_the_next_version_is_understood() -> None:
    card = example(ModelCard, full=True)
    card["spec"] |= {"of_the_future": 1, "queue": card["spec"]["queue"] | {"of_the_future": 1}}
    card["info"]["of_the_future"] = 1
    assert ModelCard.model_validate_json(json.dumps(card)).spec.name == card["spec"]["name"]
