"""Rejected requests are counted by the limit that rejected them and by the name of their key."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

from tests.integration.gateway.api_keys import add_key
from tests.integration.gateway.batches import ended, jsonl, line, start
from tests.integration.gateway.clients import openai_client
from tests.integration.gateway.conftest import CARDS, Served, ServeFn, chat, until, until_listed
from tests.support.fake_engine import FakeNode, Run, speak

URL = "/v1/chat/completions"
_SERIES = re.compile(r'thaw_requests_rejected_total\{thaw_key="(.*)",thaw_reason="(.*)"\} (.*)')


async def rejections(served: Served) -> dict[tuple[str, str], int]:
    """Read the counter: rejected requests by key and reason."""
    text = (await served.http.get("/metrics")).text
    return {(key, reason): int(float(count)) for key, reason, count in _SERIES.findall(text)}


async def send(served: Served, key: str, model: str = "alpha", **fields: Any) -> int:
    headers = {"authorization": f"Bearer sk-{key}"}
    return (await served.http.post(URL, json=chat(model, **fields), headers=headers)).status_code


async def test_every_limit_is_counted_with_the_name_of_the_key(serve: ServeFn, node: FakeNode) -> None:
    """`hasty` lets a request wait for half a second."""
    async with serve(admin_key="root") as served:
        await until_listed(served, CARDS)
        await node.engine("alpha")
        await add_key(served, "slow", "sk-slow", requests_per_minute=1)
        await add_key(served, "terse", "sk-terse", tokens_per_minute=10)
        await add_key(served, "single", "sk-single", concurrent_requests=1)
        await add_key(served, "viewer", "sk-viewer", scope="read-only")
        assert [await send(served, "slow") for _ in range(3)] == [200, 429, 429]
        assert [await send(served, "terse") for _ in range(2)] == [200, 429]
        assert await send(served, "viewer") == 403
        assert await send(served, "wrong-key") == 401
        assert await send(served, "viewer", "hasty") == 403
        waiting = asyncio.create_task(send(served, "single", "beta"))
        await until(lambda: _waits(served, "beta"))
        assert 'thaw_key_queue_length{thaw_key="single"} 1.0' in (await served.http.get("/metrics")).text
        assert await send(served, "single") == 429
        await node.engine("beta")
        assert await waiting == 200
        assert await send(served, "single", "hasty") == 504
        assert await rejections(served) == {
            ("slow", "requests_per_minute"): 2,
            ("terse", "tokens_per_minute"): 1,
            ("viewer", "permission"): 2,
            ("", "invalid_key"): 1,
            ("single", "concurrent_requests"): 1,
            ("single", "queue_timeout"): 1,
        }


async def _waits(served: Served, model: str) -> bool:
    return f'thaw_queue_length{{gen_ai_request_model="{model}"}} 1.0' in (await served.http.get("/metrics")).text


async def test_full_queue_is_counted_also_after_a_stream_has_begun(serve: ServeFn, node: FakeNode) -> None:
    """`beta` lets two requests wait; a request of another key replaces one of a key with two."""
    async with serve(admin_key="root", waking_comment_after=0.05) as served:
        await until_listed(served, CARDS)
        for key in ("flood", "other"):
            await add_key(served, key, f"sk-{key}")

        async def stream(number: int) -> tuple[int, list[str]]:
            headers = {"authorization": "Bearer sk-flood"}
            async with served.http.stream("POST", URL, json=chat("beta", stream=True), headers=headers) as answer:
                lines = []
                async for text in answer.aiter_lines():
                    lines.append(text)
                    begun[number].set()
                return answer.status_code, lines

        begun = [asyncio.Event() for _ in range(2)]
        streams = [asyncio.create_task(stream(number)) for number in range(2)]
        async with asyncio.timeout(60):
            await asyncio.gather(*(event.wait() for event in begun))
        assert await send(served, "flood", "beta") == 429
        other = asyncio.create_task(send(served, "other", "beta"))
        done, left = await asyncio.wait(streams, return_when=asyncio.FIRST_COMPLETED, timeout=60)
        [(status, lines)] = [task.result() for task in done]
        error = next(json.loads(text.removeprefix("data: ")) for text in lines if text.startswith("data: "))
        assert (status, error["error"]["code"]) == (200, "queue_full")

        async def are_counted() -> bool:
            return await rejections(served) == {("flood", "queue_full"): 2}

        await until(are_counted)
        await node.engine("beta")
        assert await other == 200
        assert [(await task)[0] for task in left] == [200]
        assert await are_counted()


async def test_rejected_requests_of_batches_are_repeated_and_not_counted(serve: ServeFn, node: FakeNode) -> None:
    async with serve(admin_key="root") as served:
        await until_listed(served, CARDS)
        released = asyncio.Event()

        async def speak_once_released(run: Run) -> None:
            await released.wait()
            await speak(run)

        engine = await node.engine("alpha", speak_once_released)
        await add_key(served, "night", "sk-night", concurrent_requests=1)
        async with openai_client(served, "sk-night") as client:
            begun = await start(client, jsonl(*(line(number) for number in range(2))))
            await engine.until(lambda: len(engine.requests) == 1)
            assert await send(served, "night") == 429
            released.set()
            batch = await ended(client, begun)
        assert batch.request_counts is not None
        assert (batch.request_counts.completed, batch.request_counts.failed) == (2, 0)
        assert await rejections(served) == {("night", "concurrent_requests"): 1}
