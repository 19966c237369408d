"""The address of a group's first rank."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import cast

import pytest
from nats.errors import OutboundBufferLimitError

from services.enginehost.ranks import head
from services.enginehost.ranks.head import RankHead
from shared.contracts.stages import LayerRange, Stage
from shared.messaging import Mesh


class AwayOnce:
    """A connection to NATS that takes nothing at first."""

    def __init__(self) -> None:
        self.calls = 0
        self.published = asyncio.Event()

    async def publish(self, subject: str, data: bytes) -> None:
        self.calls += 1
        if self.calls == 1:
            raise OutboundBufferLimitError
        self.published.set()


async def test_address_is_published_again_after_nats_was_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """Later ranks that have not joined would wait until the end of the start."""
    monkeypatch.setattr(head, "_AGAIN_S", 0.01)
    nats = AwayOnce()
    stage = Stage(group_id="g", index=0, count=2, layers=LayerRange(first=0, end=4, total=8), secret="s" * 32, first="i")
    ranks = RankHead(cast(Mesh, SimpleNamespace(nc=nats)), stage, "127.0.0.1")
    await ranks.open()
    try:
        async with asyncio.timeout(60):
            await nats.published.wait()
    finally:
        await ranks.close()


async def test_members_that_end_while_the_group_is_closed_are_no_fault() -> None:
    stage = Stage(group_id="g", index=0, count=3, layers=LayerRange(first=0, end=2, total=6), secret="s" * 32, first="i")
    ranks = RankHead(cast(Mesh, SimpleNamespace(nc=AwayOnce())), stage, "127.0.0.1")
    sent: list[bytes] = []

    class Member:
        async def drain(self) -> None:
            ranks._members.clear()  # the connections of all members are lost meanwhile

        def write(self, data: bytes) -> None:
            sent.append(data)

        def close(self) -> None:
            """No connection."""

    ranks._members = {index: cast(asyncio.StreamWriter, Member()) for index in (1, 2)}
    await ranks.close()
    assert len(sent) == 2
