"""Streams of /api/pull that are not read to their end."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.types import Message

from services.gateway.http.endpoints.ollama_pull import OLLAMA_PULL, OllamaPulls
from tests.support.fake_engine import card_of


async def test_a_client_that_leaves_after_the_first_line_leaves_no_task_behind() -> None:
    catalog = SimpleNamespace(find_model=lambda _: card_of("m"))
    gateway: Any = SimpleNamespace(closing=asyncio.Event(), catalog=catalog)

    async def receive() -> Message:
        return {"type": "http.request", "body": b'{"model":"m"}', "more_body": False}

    scope = {"type": "http", "method": "POST", "path": OLLAMA_PULL, "headers": [], "query_string": b""}
    response = await OllamaPulls(gateway).pull(Request(scope, receive))
    assert isinstance(response, StreamingResponse)
    lines: Any = response.body_iterator
    assert b"pulling manifest" in await anext(lines)
    started = {task for task in asyncio.all_tasks() if task is not asyncio.current_task()}
    assert started
    await lines.aclose()
    await asyncio.wait(started, timeout=60)
    assert all(task.done() for task in started)
