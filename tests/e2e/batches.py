"""Batches: their input, start, end and results."""

from __future__ import annotations

import json
import time
from typing import Any

import openai
from openai.types import Batch


def lines(count: int, **fields: Any) -> bytes:
    """Build the input file of a batch of chats."""
    body = {"model": "one", "temperature": 0, "max_tokens": 4} | fields
    requests = (
        {
            "custom_id": f"request-{i}",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": body | {"messages": [{"role": "user", "content": f"Number {i}"}]},
        }
        for i in range(count)
    )
    return b"".join(json.dumps(request).encode() + b"\n" for request in requests)


def start(client: openai.OpenAI, content: bytes) -> Batch:
    file = client.files.create(file=("in.jsonl", content), purpose="batch")
    return client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h", metadata={"k": "v"}
    )


def wait(client: openai.OpenAI, batch: Batch, within: float = 120.0, *, counts: int | None = None) -> Batch:
    """Wait until a batch has ended, or `counts` of its requests have."""
    deadline = time.monotonic() + within
    while True:
        batch = client.batches.retrieve(batch.id)
        assert batch.request_counts is not None
        if batch.status in ("completed", "failed", "expired", "cancelled"):
            return batch
        if counts is not None and batch.request_counts.completed >= counts:
            return batch
        assert time.monotonic() < deadline, batch
        time.sleep(0.05)


def results(client: openai.OpenAI, file_id: str | None) -> list[dict[str, Any]]:
    assert file_id is not None
    return [json.loads(line) for line in client.files.content(file_id).text.splitlines()]
