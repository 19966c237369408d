"""A key that floods a model neither starves another key nor gets it refused."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

from tests.integration.gateway.api_keys import add_key
from tests.integration.gateway.conftest import CARDS, ServeFn, chat, until, until_listed
from tests.support.fake_engine import FakeNode


async def test_a_flood_of_one_key_is_refused_itself_and_another_key_is_served_first(serve: ServeFn, node: FakeNode) -> None:
    """`beta` lets two requests wait."""
    async with serve(admin_key="root") as served:
        await until_listed(served, CARDS)
        for key in ("flood", "other"):
            await add_key(served, key, f"sk-{key}")
        ended: list[str] = []

        async def send(key: str) -> int:
            headers = {"authorization": f"Bearer sk-{key}"}
            answer: Any = await served.http.post("/v1/chat/completions", json=chat("beta"), headers=headers)
            ended.append(key)
            if answer.status_code == 429:
                assert answer.json()["error"]["code"] == "queue_full"
                assert int(answer.headers["retry-after"]) >= 1
            return int(answer.status_code)

        flood = [asyncio.create_task(send("flood")) for _ in range(20)]
        await until(lambda: _has_ended(ended, 18))
        other = asyncio.create_task(send("other"))
        await until(lambda: _has_ended(ended, 19))
        assert ended == ["flood"] * 19
        await node.engine("beta")
        assert await other == 200
        assert Counter([await task for task in flood]) == {429: 19, 200: 1}


async def _has_ended(ended: list[str], count: int) -> bool:
    return len(ended) >= count


async def test_a_key_asks_for_a_priority_up_to_its_own(serve: ServeFn, node: FakeNode) -> None:
    """`beta` lets two requests wait."""
    async with serve(admin_key="root") as served:
        await until_listed(served, CARDS)
        await add_key(served, "urgent", "sk-urgent", priority=5, weight=2)
        await add_key(served, "plain", "sk-plain")

        async def send(key: str, priority: str) -> tuple[int, str]:
            headers = {"authorization": f"Bearer sk-{key}", "x-thaw-priority": priority}
            answer: Any = await served.http.post("/v1/chat/completions", json=chat("beta"), headers=headers)
            return answer.status_code, answer.json().get("error", {}).get("code", "")

        waiting = {asyncio.create_task(send("plain", "100")) for _ in range(3)}
        done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED, timeout=30)
        assert [task.result() for task in done] == [(429, "queue_full")]  # now the queue is full
        urgent = asyncio.create_task(send("urgent", "100"))
        done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED, timeout=30)
        assert [task.result() for task in done] == [(429, "queue_full")]
        assert (await send("urgent", "much"))[0] == 400
        await node.engine("beta")
        assert (await urgent)[0] == 200
        assert [(await task)[0] for task in waiting] == [200]
