"""Batches of a real mesh, by the real openai client."""

from __future__ import annotations

import json
import time
from typing import Any

import openai
from openai.types import Batch

SHARED = True


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


def test_batch_has_the_answers_of_its_requests(client: openai.OpenAI) -> None:
    batch = wait(client, start(client, lines(3)))
    assert (batch.status, batch.metadata, batch.model) == ("completed", {"k": "v"}, "one")
    assert batch.request_counts is not None
    assert (batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed) == (3, 3, 0)
    assert batch.error_file_id is None
    answered = results(client, batch.output_file_id)
    assert [answer["custom_id"] for answer in answered] == ["request-0", "request-1", "request-2"]
    for i, answer in enumerate(answered):
        assert (answer["error"], answer["response"]["status_code"]) == (None, 200)
        asked: Any = {"model": "one", "temperature": 0, "max_tokens": 4}
        alone = client.chat.completions.create(**asked, messages=[{"role": "user", "content": f"Number {i}"}])
        assert answer["response"]["body"]["choices"][0]["message"]["content"] == alone.choices[0].message.content
    assert batch.id in [found.id for found in client.batches.list(limit=1)]
