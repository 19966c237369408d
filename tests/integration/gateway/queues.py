"""The gateway's queues, by its metrics."""

from __future__ import annotations

from tests.integration.gateway.conftest import Served


async def queued(gateway: Served, model: str, count: int) -> bool:
    text = (await gateway.http.get("/metrics")).text
    return f'thaw_queue_length{{gen_ai_request_model="{model}"}} {count:.1f}' in text
