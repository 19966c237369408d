"""Messages of an idempotent response that its owner missed, read from the stored stream.

NATS may have stored messages that it did not deliver, as during a reconnection (docs/adr/0039).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from functools import partial

from nats.errors import Error as NatsError

from services.gateway.adapters.idempotency_store import Entry
from services.gateway.domain.dispatcher import Dispatcher
from services.gateway.idempotency.replay import Replay
from services.gateway.idempotency.store_retry import retry_store
from services.gateway.requests.active_request import ActiveRequest
from services.gateway.requests.response_reader import Attempt
from shared.errors import EngineFailed
from shared.tasks import end

log = logging.getLogger(__name__)
_GAP_TIMEOUT_S = 5.0
"""The owner expects missing messages from the stored stream for this long."""


class MissedMessages:
    """Read what the owner missed of its present attempt, beside the live messages."""

    def __init__(
        self, replay: Replay, request: ActiveRequest, dispatcher: Dispatcher, find_live_entry: Callable[[], Entry | None]
    ) -> None:
        """Create the reader; it starts nothing.

        Args:
            find_live_entry: Returns the key's entry while this gateway receives the messages of
                the attempt in it; else None.
        """
        self._replay = replay
        self._request = request
        self._dispatcher = dispatcher
        self._find_live_entry = find_live_entry
        self._reading: asyncio.Task[None] | None = None
        self._gap_timer: asyncio.TimerHandle | None = None

    def catch_up(self) -> None:
        """Read the stored messages of the attempt too; live ones may have been missed."""
        entry = self._find_entry()
        if entry is not None and (self._reading is None or self._reading.done()):
            self._reading = asyncio.create_task(self._read(entry), name="idempotency catch-up")

    def recover_gap(self) -> bool:
        """Expect missing messages from the store; False if the store does not have them either."""
        entry = self._find_entry()
        if entry is None:
            return False
        if self._replay.subject != entry.reply:
            self.catch_up()
        if self._gap_timer is None:
            attempt = self._request.attempt
            later = asyncio.get_running_loop().call_later
            self._gap_timer = later(_GAP_TIMEOUT_S, self._on_gap_timeout, attempt, attempt.next_seq)
        return True

    async def stop(self) -> None:
        """Stop reading: the attempt has ended."""
        if self._gap_timer is not None:
            self._gap_timer.cancel()
            self._gap_timer = None
        if self._reading is not None:
            await end(self._reading)
            self._reading = None

    def _find_entry(self) -> Entry | None:
        if self._replay.is_delivering or self._request.completion.is_done:
            return None
        return self._find_live_entry()

    async def _read(self, entry: Entry) -> None:
        try:
            await retry_store(partial(self._replay.catch_up, entry))
        except (NatsError, TimeoutError) as e:
            log.info("failed to read the stored messages of a response", extra={"error": repr(e)})

    def _on_gap_timeout(self, attempt: Attempt, first_missing: int) -> None:
        """Continue the response elsewhere, unless the missing messages have arrived."""
        self._gap_timer = None
        if self._request.attempt is attempt and attempt.next_seq == first_missing and not self._request.completion.is_done:
            ticket = self._request.ticket
            gap = EngineFailed(f"Messages of {ticket.model} were lost: number {first_missing} is missing")
            self._dispatcher.on_message_gap(ticket, gap, time.monotonic())
