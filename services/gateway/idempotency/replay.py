"""Replay of the captured response of an idempotent request."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

from nats.errors import Error as NatsError
from pydantic_core import from_json

from services.gateway.adapters.idempotency_store import Entry, IdempotencyStore, ResponsePart
from services.gateway.requests.active_request import ActiveRequest
from services.gateway.requests.engine_messages import ends_attempt, is_duplicate_refusal
from shared.errors import EngineFailed, from_body

REPLAY_TIMEOUT_S = 30.0
"""Longest silence while a completed response is read."""
Unsubscribe = Callable[[], Awaitable[None]]


class Replay:
    """Feed a request the captured messages of one reply subject after the other.

    Attributes:
        subject: The reply subject that is read; empty if none is.
        is_delivering: A stored message is being passed to the request.
    """

    def __init__(self, store: IdempotencyStore, request: ActiveRequest) -> None:
        self.subject = ""
        self.is_delivering = False
        self._store = store
        self._request = request
        self._ticket = request.ticket
        self._limit = 0
        self._limit_reached = asyncio.Event()
        self._failed_entry: Entry | None = None
        self._unsubscribes: list[Unsubscribe] = []

    async def follow(self, entry: Entry) -> None:
        """Read the response that the key's entry names, and fail as it failed."""
        self._failed_entry = entry if entry.error is not None else None
        if entry.reply and entry.reply != self.subject:
            await self.read(entry)
        self._fail_if_complete()

    async def read(self, entry: Entry) -> None:
        """Read an attempt from its first message on, after the parts that it continues."""
        unread = self._unread_parts(entry)
        if not (unread and unread[0].reply == self.subject):
            self.require_restartable()
            await self.stop()
            self._request.restart()
        for part in unread:
            await self._subscribe(part.reply, entry)
            unconfirmed = await self._read_part(part)
            await self.stop()
            self._request.resume_after(unconfirmed)
        if entry.reply:
            await self._subscribe(entry.reply, entry)

    async def catch_up(self, entry: Entry) -> None:
        """Read the present attempt from the store, beside its live messages.

        Some of the live messages may have been missed.
        """
        await self.stop()
        await self._subscribe(entry.reply, entry)

    async def read_missed(self, entry: Entry) -> int:
        """Read what is stored of an attempt that has ended and was not received.

        If some of what was received is not stored, expect it to be generated again: every reader of
        the key continues from the stored messages.

        Returns:
            The number of messages of the attempt that the response consists of.
        """
        request = self._request
        await self._store.wait_until_captured(entry.reply, request.attempt.next_seq)
        stored = _without_gap(await self._store.stored_messages(entry.reply))
        attempt = request.attempt
        for data, message in stored[attempt.next_seq :]:
            is_refusal = message["kind"] == "failed" and attempt.next_seq == 0
            if request.completion.is_done or is_refusal or ends_attempt(message):
                break
            self._deliver(data)
        messages = min(len(stored), attempt.next_seq)
        if messages < attempt.next_seq:
            request.resume_state.rewind_to(message for _, message in stored[:messages])
        return messages

    async def stored_part(self, entry: Entry) -> ResponsePart:
        """Return the part of the present attempt that is stored."""
        return ResponsePart(reply=entry.reply, messages=len(_without_gap(await self._store.stored_messages(entry.reply))))

    async def is_available(self, entry: Entry) -> bool:
        """True if the messages that have not been read are still stored."""
        if entry.state == "running" or entry.reply == self.subject:
            return True
        for part in self._unread_parts(entry):
            if not await self._is_stored(part):
                return False
        return await self._store.captured_messages(entry.reply) >= entry.messages

    async def has_lost_parts(self, entry: Entry) -> bool:
        """True if a part that has not been read is not stored: NATS was killed before it had stored
        what it delivered.
        """
        for part in self._unread_parts(entry):
            if not await self._store.wait_until_captured(part.reply, part.messages) or not await self._is_stored(part):
                return True
        return False

    async def _is_stored(self, part: ResponsePart) -> bool:
        """True if all messages of a part are stored.

        Their number is not enough: its engine may have sent more.
        """
        return len(_without_gap(await self._store.stored_messages(part.reply))) >= part.messages

    def require_restartable(self) -> None:
        """Check that the response can start again.

        Raises:
            EngineFailed: The client has received some of a response that is no longer available.
        """
        sink = self._request.response.sink
        has_forwarded = self._request.resume_state.tokens and sink.streams and not sink.is_repeatable
        if self._ticket.is_committed or has_forwarded:
            raise EngineFailed("The response under this Idempotency-Key broke off. Repeat the request")

    def on_stop(self, unsubscribe: Unsubscribe) -> None:
        """Call `unsubscribe` with the next `stop`."""
        self._unsubscribes.append(unsubscribe)

    async def stop(self) -> None:
        unsubscribes, self._unsubscribes, self.subject = self._unsubscribes, [], ""
        for unsubscribe in unsubscribes:
            with contextlib.suppress(NatsError, TimeoutError):
                await unsubscribe()

    def _unread_parts(self, entry: Entry) -> tuple[ResponsePart, ...]:
        """Return the parts not yet read to their end; the first may be in progress."""
        if self.subject and self.subject == entry.reply:
            return ()
        first = next((n for n, part in enumerate(entry.parts) if part.reply == self.subject), 0)
        return entry.parts[first:]

    async def _subscribe(self, subject: str, entry: Entry) -> None:
        """Read a reply subject from its first message on, up to the limit that is set."""
        if self.subject == subject:
            return
        request, ticket = self._request, self._ticket
        self.subject, ticket.attempt_id = subject, entry.attempt_id
        request.attempt.revision = entry.revision
        self._limit = 0
        self._limit_reached.clear()

        def on_message(data: bytes) -> None:
            if self.subject != subject or ticket.attempt_id != entry.attempt_id or self._limit_reached.is_set():
                return
            self._deliver(data)
            if 0 < self._limit <= request.attempt.next_seq:
                self._limit_reached.set()
            self._fail_if_complete()

        try:
            self._unsubscribes.append(await self._store.read_captured(subject, on_message))
        except BaseException:
            self.subject = ""
            raise

    def _deliver(self, data: bytes) -> None:
        self.is_delivering = True
        try:
            self._request.on_message(data)
        finally:
            self.is_delivering = False

    async def _read_part(self, part: ResponsePart) -> list[dict[str, Any]]:
        """Read the messages of a part, and no more.

        Returns:
            Messages beyond the part that were read already: its owner did not receive them.
        """
        request = self._request
        if request.attempt.next_seq > part.messages:
            self._limit_reached.set()
            return await self._reread(part.reply, part.messages, request.attempt.next_seq)
        self._limit = part.messages
        if request.attempt.next_seq == part.messages:
            self._limit_reached.set()
        await self._wait_for_any(request.completion.done, self._limit_reached)
        return []

    async def _reread(self, subject: str, first: int, end: int) -> list[dict[str, Any]]:
        """Read the messages `first` to `end` - 1 once more."""
        found: dict[int, dict[str, Any]] = {}
        has_last = asyncio.Event()

        def on_message(data: bytes) -> None:
            message = from_json(data)
            found.setdefault(message["seq"], message)
            if end - 1 in found:
                has_last.set()

        unsubscribe = await self._store.read_captured(subject, on_message)
        try:
            await self._wait_for_any(self._request.completion.done, has_last)
        finally:
            await unsubscribe()
        return [found[n] for n in range(first, end) if n in found]

    @staticmethod
    async def _wait_for_any(*events: asyncio.Event) -> None:
        """Wait until one event is set. Raises `TimeoutError`."""
        waits = [asyncio.create_task(e.wait()) for e in events]
        try:
            async with asyncio.timeout(REPLAY_TIMEOUT_S):
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    def _fail_if_complete(self) -> None:
        """Fail as the response failed, once all of its output has been read."""
        entry = self._failed_entry
        if entry is None or entry.error is None or entry.reply != self.subject:
            return
        if self._request.attempt.next_seq >= entry.messages:
            self._request.completion.fail(from_body(entry.error))


def _without_gap(stored: list[bytes]) -> list[tuple[bytes, dict[str, Any]]]:
    """Return the messages before the first missing one, encoded and decoded."""
    found: list[tuple[bytes, dict[str, Any]]] = []
    for data in stored:
        try:
            message = from_json(data)
            if message["seq"] == len(found) and not is_duplicate_refusal(message):
                found.append((data, message))
        except (ValueError, KeyError, TypeError):
            break  # malformed
    return found
