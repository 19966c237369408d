"""Requests with one Idempotency-Key: their engine, and their entry in the store."""

from __future__ import annotations

import asyncio
import json

from services.gateway.adapters.idempotency_store import Claim, Entry, IdempotencyStore, digest
from services.gateway.authorization import Authorizer
from shared.contracts import subjects
from shared.errors import Conflict
from tests.integration.gateway.conftest import CARDS, ServeFn, chat, until, until_listed
from tests.support.fake_engine import WORDS, FakeEngine, FakeNode, Run

URL = "/v1/chat/completions"
TEXT = "".join(WORDS)
KEY = {"idempotency-key": "k-1"}
NAME = digest(Authorizer.key_hash({}).encode(), URL.encode(), b"k-1")


class Paced:
    """Engine behaviour: one word, then the rest when `go` is set.

    It refuses two concurrent attempts at one request.
    """

    def __init__(self, rest: str = "two") -> None:
        self.go = asyncio.Event()
        self.rest = rest
        self._at: set[str] = set()

    async def __call__(self, run: Run) -> None:
        name = run.request.request_id
        if name in self._at:
            await run.fail(Conflict("it is running here already"))
            return
        self._at.add(name)
        await run.start()
        await run.text("one ")
        going, leaving = asyncio.create_task(self.go.wait()), asyncio.create_task(run.cancelled.wait())
        await asyncio.wait([going, leaving], return_when=asyncio.FIRST_COMPLETED)
        for task in (going, leaving):
            task.cancel()
        if not run.cancelled.is_set():
            await run.text(self.rest)
            await run.finish(2)


def content(text: str) -> str:
    """Return the concatenated content of a stream."""
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    return "".join(e["choices"][0]["delta"].get("content") or "" for e in events)


async def entry_of(node: FakeNode) -> Entry | None:
    bucket = await node.mesh.nc.jetstream().key_value(subjects.IDEMPOTENCY_BUCKET)
    value = (await bucket.get(NAME)).value
    return Entry.model_validate_json(value) if value else None


async def taken_over(node: FakeNode) -> bool:
    """True if the key's owner is another gateway than the engine responds to."""
    entry = await entry_of(node)
    return entry is not None and entry.owner.split(":")[0] != entry.reply.split(".")[-2]


async def claimed(node: FakeNode, body: bytes) -> Claim:
    """Leave a key as a gateway does that dies."""
    dead = IdempotencyStore(node.mesh, "dead", 3600.0, 2**24)
    claim = await dead.claim_or_get(NAME, Entry(request=digest(body), answer_id="chatcmpl-dead", created=1))
    assert isinstance(claim, Claim)
    return claim


async def hand_over(node: FakeNode, serve: ServeFn) -> FakeEngine:
    """Stop a gateway during a generation, which another gateway continues; return the engine."""
    paced = Paced()
    engine = await node.engine("alpha", paced)
    async with serve(drain_timeout=0.2) as first, serve() as second:
        await until_listed(first, CARDS)
        await until_listed(second, CARDS)
        async with first.http.stream("POST", URL, json=chat(stream=True), headers=KEY) as broken:
            lines = broken.aiter_lines()
            await anext(lines)
            first.stop.set()
            assert "shutting_down" in [line async for line in lines if line][-1]
        again = asyncio.create_task(second.http.post(URL, json=chat(stream=True), headers=KEY))
        await until(lambda: taken_over(node))
        paced.go.set()
        assert content((await again).text) == "one two"
    return engine


async def ended(node: FakeNode) -> bool:
    entry = await entry_of(node)
    return entry is not None and entry.state == "done"
