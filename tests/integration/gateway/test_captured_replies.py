"""A gateway finds out which of an engine's messages NATS has stored, and which it lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from services.gateway.adapters import idempotency_store
from services.gateway.adapters.idempotency_store import Claim, Entry, IdempotencyStore
from shared.contracts import subjects
from shared.messaging import Mesh
from tests.support.mesh_client import connected_mesh
from tests.support.nats_accounts import NatsAccount

REPLY, OTHER = subjects.keyed_reply("g", "one-1"), subjects.keyed_reply("g", "other-1")
ENTRY = Entry(request="r", answer_id="a", created=1, reply=REPLY)


async def opened(mesh: Mesh) -> IdempotencyStore:
    """Return a store with its stream, which the first claim makes."""
    store = IdempotencyStore(mesh, "g", 3600, 1 << 20)
    assert isinstance(await store.claim_or_get("k", ENTRY), Claim)
    return store


@pytest.fixture
async def mesh(own_nats: NatsAccount) -> AsyncIterator[Mesh]:
    async with connected_mesh(own_nats) as mesh:
        yield mesh


async def send(mesh: Mesh, reply: str, first: int, count: int = 1) -> None:
    """Send messages as engines do: without a confirmation."""
    for number in range(first, first + count):
        await mesh.nc.publish(reply, b"%d" % number)
    await mesh.flush()


async def test_lost_messages_are_found_while_the_stream_stores_others(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy stream does not hide that messages are lost."""
    monkeypatch.setattr(idempotency_store, "_CAPTURE_TIMEOUT_S", 0.2)
    store = await opened(mesh)
    await send(mesh, REPLY, 0, 3)

    async def store_others() -> None:
        for number in range(1_000_000):
            await send(mesh, OTHER, number)

    others = asyncio.create_task(store_others())
    try:
        async with asyncio.timeout(60):
            assert not await store.wait_until_captured(REPLY, 5)
            assert await store.wait_until_captured(REPLY, 3)
    finally:
        others.cancel()
    assert await store.stored_messages(REPLY) == [b"0", b"1", b"2"]


async def test_messages_that_arrive_after_the_marker_still_count(mesh: Mesh) -> None:
    store = await opened(mesh)
    await send(mesh, REPLY, 0, 3)
    waiting = asyncio.create_task(store.wait_until_captured(REPLY, 5))
    marker = subjects.keyed_marker("g")
    async with asyncio.timeout(60):
        while not await store.captured_messages(marker):  # noqa: ASYNC110 - the stream reports no event
            await asyncio.sleep(0.02)
    await send(mesh, REPLY, 3, 2)
    assert await waiting
    assert await store.stored_messages(REPLY) == [b"0", b"1", b"2", b"3", b"4"]
