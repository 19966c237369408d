"""The source of a transfer: offers of keys and values of this engine's requests.

An engine listens from its first offer on. The first stage of a group also offers what the later
stages have (ADR 0093).
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol, TypeVar

from services.engine.domain.kv_frames import TICKET_BYTES
from services.engine.domain.kv_pieces import KvIdentity, Piece
from services.engine.generation.kv_transfers import KvTransfers, Permission, Snapshot, retained_name
from services.engine.kv_transfer.readers import KvReaders, Ticket
from shared.contracts.kv_transfer import KvLayout, KvOffer

R = TypeVar("R")
RETAIN_S = 5.0
"""Seconds that keys and values of a moved request are kept, for the engine that reads them."""


class Transferring(Protocol):
    """The engine's batcher."""

    def transfer(self, work: Callable[[KvTransfers], R]) -> Future[R]: ...


class _BatcherReading:
    """Reads the sequences of a batcher."""

    def __init__(self, batcher: Transferring) -> None:
        self._batcher = batcher

    def snapshot(self, request_id: str, choice: int) -> Future[Snapshot]:
        return self._batcher.transfer(lambda t: t.snapshot(request_id, choice))

    def copy(self, request_id: str, choice: int, piece: Piece) -> Future[memoryview]:
        return self._batcher.transfer(lambda t: t.copy(request_id, choice, piece))


class KvSource:
    """Offers keys and values of this engine's requests. Its methods run on the event loop."""

    def __init__(self, batcher: Transferring, revision: str, host: str) -> None:
        """Create it. Nothing listens before the first offer.

        Args:
            batcher: Has the keys and values.
            revision: Of the model's weights.
            host: Address to listen on, which other engines can reach.
        """
        self._batcher, self._revision = batcher, revision
        self._readers = KvReaders(host, _BatcherReading(batcher), self._on_unread)

    async def offer(self, request_id: str, variant: str, cache_salt: str) -> KvOffer:
        """Permit another engine to read a request. Repeated offers have the same ticket.

        Raises:
            ThawError: This engine does not transfer keys and values.
        """
        layout = await asyncio.wrap_future(self._batcher.transfer(KvTransfers.layout))
        ticket = self._readers.find(request_id)
        if ticket is None:
            identity = KvIdentity(self._revision, variant, cache_salt, layout)
            ticket = Ticket(secrets.token_hex(TICKET_BYTES), secrets.token_urlsafe(32), request_id, identity)
        self._readers.renew(ticket)
        host, port = self._readers.listen()
        permission = Permission(request_id, ticket.ticket, ticket.secret, cache_salt)
        later = await asyncio.wrap_future(self._batcher.transfer(lambda t: t.permit(permission)))
        return KvOffer(
            host=host,
            port=port,
            ticket=ticket.ticket,
            secret=ticket.secret,
            layout=layout,
            selects_layers=True,
            cache_salt=cache_salt,
            later=later,
        )

    def retain_s(self, request_id: str) -> float:
        """Return how long the keys and values of a request are kept after it has stopped.

        0: no engine reads them.
        """
        return RETAIN_S if self._readers.is_read(request_id) else 0.0

    def call_when_unread(self, callback: Callable[[], None]) -> bool:
        """Call `callback` when no engine reads any more, after `RETAIN_S` at the latest.

        False: no engine reads now.
        """
        loop = asyncio.get_running_loop()
        if not self._readers.call_when_idle(lambda: loop.call_soon_threadsafe(callback)):
            return False
        loop.call_later(RETAIN_S, callback)
        return True

    async def close(self) -> None:
        """Close all connections."""
        await self._readers.close()

    def _on_unread(self, ticket: Ticket) -> None:
        """Discard what a moved request has left: no other engine reads it."""
        self._batcher.transfer(lambda t: t.discard(retained_name(ticket.request_id)))


def layout_difference(own: KvLayout, other: KvLayout) -> str:
    """Return why keys and values of `other` cannot be used with `own`; empty: they can."""
    if own == other:
        return ""
    for name in ("version", "dtype", "byte_order", "layers"):
        if getattr(own, name) != getattr(other, name):
            return f"the engines store keys and values differently ({name})"
    return "the engines store keys and values differently"
