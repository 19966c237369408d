"""The channel map is complete, and the AsyncAPI document matches the contracts."""

from __future__ import annotations

import importlib
import inspect
import json
import pkgutil
import subprocess
import sys
from pathlib import Path

import shared.contracts
from shared.contracts.base import Message, Request
from shared.contracts.channels import CHANNELS

ROOT = Path(__file__).resolve().parents[2]
BETWEEN_STAGES = {"GroupCapacity", "GroupClosing", "KvEndReceive", "KvPermit", "KvReceive", "KvReceived", "StageFailed"}
BETWEEN_STAGES |= {"StageRelease", "StageResult", "StageStep"}
BETWEEN_ENGINES = {"KvPull", "KvPiece", "KvPulled"}
NOT_ON_NATS = {"EngineStart", "ExecutorStart", "EngineForked", "EngineExited", "ZygoteFailure", "ZygoteReady"} | {
    f"Socket{name}"
    for name in (
        *("Attach", "Attached", "Audit", "Audited", "Watermark", "Complete", "Error"),
        *("Follow", "Arrived", "Pages", "Units", "Map", "Descriptors"),
        *("Borrow", "Lent", "Demand", "Return", "Shrink", "Borrowing"),
    )
}


PARTS = {"LoaderProgress", "NodeOutline"}
"""Messages of other types that a receiver reads in part."""


def test_every_message_is_on_a_channel() -> None:
    declared: set[str] = set()
    for module in pkgutil.iter_modules(shared.contracts.__path__):
        found = inspect.getmembers(importlib.import_module(f"shared.contracts.{module.name}"), inspect.isclass)
        declared |= {name for name, kind in found if issubclass(kind, Message) and kind not in (Message, Request)}
    mapped = {kind.__name__ for channel in CHANNELS for kind in (*channel.messages, *channel.replies)}
    assert declared - mapped == NOT_ON_NATS | BETWEEN_STAGES | BETWEEN_ENGINES | PARTS


def test_messages_of_one_channel_are_distinguished_by_kind() -> None:
    for channel in CHANNELS:
        for kinds in (channel.messages, channel.replies):
            names = [kind.model_fields["kind"].default for kind in kinds]
            assert len(set(names)) == len(names), channel.name


def test_each_channel_is_listed_once() -> None:
    names = [channel.name for channel in CHANNELS]
    assert sorted(set(names)) == sorted(names)


def test_the_document_is_up_to_date() -> None:
    made = subprocess.run([sys.executable, "docs/generate_asyncapi.py"], cwd=ROOT, capture_output=True, text=True, check=True)
    document = json.loads(made.stdout)
    assert (ROOT / "docs" / "asyncapi.json").read_text() == made.stdout, (
        "run: python docs/generate_asyncapi.py > docs/asyncapi.json"
    )
    references = set(_references(document))
    assert references
    for reference in references:
        node = document
        for part in reference.removeprefix("#/").split("/"):
            node = node[part]


def _references(node: object) -> list[str]:
    if isinstance(node, dict):
        own = [node["$ref"]] if isinstance(node.get("$ref"), str) else []
        return own + [r for value in node.values() for r in _references(value)]
    return [r for value in node for r in _references(value)] if isinstance(node, list) else []
