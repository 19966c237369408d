"""A connection to NATS that takes messages when a test says so."""

from __future__ import annotations

import asyncio


class SlowNats:
    """The part of `Mesh` that sends responses.

    Attributes:
        takes: Set while it takes messages.
        taken: Bodies by subject.
    """

    def __init__(self) -> None:
        self.takes = asyncio.Event()
        self.taken: dict[str, list[bytes]] = {}
        self.nc = self
        self.max_body = 1 << 20

    async def publish(self, subject: str, body: bytes) -> None:
        await self.takes.wait()
        self.taken.setdefault(subject, []).append(body)
