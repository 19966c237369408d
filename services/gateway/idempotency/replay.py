"""Reading what engines say under an Idempotency-Key, from the first message of the first part on."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

from nats.errors import Error as NatsError
from pydantic_core import from_json

from services.gateway.adapters.idempotency_store import Entry, IdempotencyStore, Part
from services.gateway.requests.active_request import Exchange
from shared.errors import EngineFailed, from_body

REPLAY_S = 30.0
"""Longest silence while an answer that is whole is read."""
End = Callable[[], Awaitable[None]]


class Listener:
    """Gives one exchange the messages of one subject after the other. `heard`: the present one; empty: none."""

    def __init__(self, store: IdempotencyStore, exchange: Exchange) -> None:
        self._store = store
        self._exchange = exchange
        self._ticket = exchange.ticket
        self.heard = ""
        self._limit = 0
        self._whole = asyncio.Event()
        self._broken_off: Entry | None = None
        self._ends: list[End] = []

    async def follow(self, entry: Entry) -> None:
        """The key's entry is so now: read what it names, and end as it did."""
        self._broken_off = entry if entry.error is not None else None
        if entry.reply and entry.reply != self.heard:
            await self.listen(entry)
        self._break_off()

    async def listen(self, entry: Entry) -> None:
        """Read an attempt from its first message on; before it what it goes on from, as far as that has not been read."""
        unread = self._unread(entry)
        if not (unread and unread[0].reply == self.heard):
            self.require_unbegun()
            await self.stop()
            self._exchange.restart()
        for part in unread:
            await self._hear(part.reply, entry)
            too_many = await self._received(part)
            await self.stop()
            self._exchange.go_on(too_many)
        await self._hear(entry.reply, entry)

    async def there(self, entry: Entry) -> bool:
        """Whether what was answered is still kept, as far as it has not been read yet."""
        if entry.state == "running" or entry.reply == self.heard:
            return True
        for part in self._unread(entry):
            if await self._store.stored(part.reply) < part.messages:
                return False
        return await self._store.stored(entry.reply) >= entry.messages

    def require_unbegun(self) -> None:
        """Raises `EngineFailed` if the client has some of an answer that cannot be read on."""
        exchange = self._exchange
        half = exchange.made.tokens and exchange.sink.streams and not exchange.sink.repeatable
        if self._ticket.begun or half:
            raise EngineFailed("the answer that this Idempotency-Key had begun to get was broken off; repeat the request")

    def also_end(self, end: End) -> None:
        """Have `end` called with the next `stop`."""
        self._ends.append(end)

    async def stop(self) -> None:
        ends, self._ends, self.heard = self._ends, [], ""
        for end in ends:
            with contextlib.suppress(NatsError, TimeoutError):
                await end()

    def _unread(self, entry: Entry) -> tuple[Part, ...]:
        """Parts that have not been read whole; the first of them may have been begun."""
        at = next((n for n, part in enumerate(entry.parts) if part.reply == self.heard), 0)
        return entry.parts[at:]

    async def _hear(self, reply: str, entry: Entry) -> None:
        """Take what an engine says or said, up to the limit that is set."""
        if self.heard == reply:
            return
        exchange, ticket = self._exchange, self._ticket
        self.heard, ticket.attempt_id, exchange.revision = reply, entry.attempt_id, entry.revision
        self._limit = 0
        self._whole.clear()

        def take(data: bytes) -> None:
            if self.heard != reply or ticket.attempt_id != entry.attempt_id or self._whole.is_set():
                return
            exchange.on_message(data)
            if 0 < self._limit <= exchange.received:
                self._whole.set()
            self._break_off()

        try:
            self._ends.append(await self._store.follow(reply, take))
        except BaseException:
            self.heard = ""
            raise

    async def _received(self, part: Part) -> list[dict[str, Any]]:
        """Take the part's messages of what is heard and no more; those that have been taken beyond them: its owner did not hear them."""
        exchange = self._exchange
        if exchange.received > part.messages:
            self._whole.set()
            return await self._read(part.reply, part.messages, exchange.received)
        self._limit = part.messages
        if exchange.received == part.messages:
            self._whole.set()
        await self._either(exchange.over, self._whole)
        return []

    async def _read(self, reply: str, first: int, end: int) -> list[dict[str, Any]]:
        """Messages by their numbers, once more."""
        found: dict[int, dict[str, Any]] = {}
        last = asyncio.Event()

        def take(data: bytes) -> None:
            message = from_json(data)
            found.setdefault(message["seq"], message)
            if end - 1 in found:
                last.set()

        stop = await self._store.follow(reply, take)
        try:
            await self._either(self._exchange.over, last)
        finally:
            await stop()
        return [found[n] for n in range(first, end) if n in found]

    @staticmethod
    async def _either(*events: asyncio.Event) -> None:
        """Wait for one of them. Raises `TimeoutError`."""
        waits = [asyncio.create_task(e.wait()) for e in events]
        try:
            async with asyncio.timeout(REPLAY_S):
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    def _break_off(self) -> None:
        """End as the answer did, once all has been read that came of it."""
        entry = self._broken_off
        if (
            entry is not None
            and entry.error is not None
            and entry.reply == self.heard
            and self._exchange.received >= entry.messages
        ):
            self._exchange.fail(from_body(entry.error))
