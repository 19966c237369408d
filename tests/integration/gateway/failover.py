"""Engines that stop at a token or die, and the content that clients receive."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from shared.contracts.node import InstanceState
from shared.errors import EngineFailed
from tests.support.fake_engine import FakeEngine, FakeNode

URL = "/v1/chat/completions"
TEXT = "Grüße aus 日本 - 🙂 done"


def holding(number: int, event: asyncio.Event | None = None) -> Any:
    """Stop before that token of an attempt."""
    forever = event or asyncio.Event()
    return lambda run, tokens: forever if tokens == number else None


async def die(node: FakeNode, engine: FakeEngine) -> None:
    await engine.vanish()
    engine.state, engine.error = InstanceState.FAILED, EngineFailed("killed by signal 9").body()
    await node.announce()


def events(body: str) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in body.split("\n") if line.startswith("data: {")]


def content_of(body: str, index: int = 0) -> str:
    return "".join(c["delta"].get("content") or "" for e in events(body) for c in e.get("choices", ()) if c["index"] == index)
