"""Batches: their input, start and end."""

from __future__ import annotations

import json
from typing import Any, Final

import openai
from openai.types import Batch

from tests.integration.gateway.conftest import chat, until

CHAT: Final = "/v1/chat/completions"
ENDED = ("completed", "failed", "expired", "cancelled")


def line(number: int, **fields: Any) -> dict[str, Any]:
    return {"custom_id": f"r{number}", "method": "POST", "url": CHAT, "body": chat(user=str(number))} | fields


def jsonl(*lines: Any) -> bytes:
    return b"".join((text if isinstance(text, bytes) else json.dumps(text).encode()) + b"\n" for text in lines)


async def start(client: openai.AsyncOpenAI, content: bytes, endpoint: Any = CHAT) -> Batch:
    file = await client.files.create(file=("in.jsonl", content), purpose="batch")
    return await client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h")


async def ended(client: openai.AsyncOpenAI, batch: Batch) -> Batch:
    found = [batch]

    async def has_ended() -> bool:
        found[0] = await client.batches.retrieve(batch.id)
        return found[0].status in ENDED

    await until(has_ended)
    return found[0]
