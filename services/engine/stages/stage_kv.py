"""The keys and values of a later stage that engines of other instances read (ADR 0093).

The first stage knows the requests and their tokens. It passes them on with a ticket before it
offers them (`KvPermit`). Each stage then sends the layers that it has over its own connections.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from services.engine.domain.kv_pieces import KvIdentity, Piece
from services.engine.generation.kv_bytes import read_piece
from services.engine.generation.kv_cache import SequenceKV
from services.engine.generation.kv_transfers import Snapshot
from services.engine.kv_transfer.readers import KvReaders, Ticket
from shared.contracts.kv_transfer import KvLayout, KvPart
from shared.contracts.stages import KvPermit
from shared.errors import NotFound, ThawError

Submit = Callable[[Callable[[], Any]], Future[Any]]


@dataclass(frozen=True)
class _Permitted:
    """A sequence that may be read: its number in the group, and what it has."""

    sequence: int
    snapshot: Snapshot


class StageKv:
    """Sends the keys and values of one later stage.

    `permit` and `release` run on the computing thread.
    """

    def __init__(self, layout: KvLayout, revision: str, host: str, held: Mapping[int, SequenceKV], submit: Submit) -> None:
        """Create it on the event loop. Nothing listens before the first permission.

        Args:
            layout: Of this stage's layers.
            revision: Of the model's weights.
            host: Address to listen on, which other engines can reach.
            held: The stage's sequences by their number; changed on the computing thread only.
            submit: Runs a function on the computing thread, between two steps.
        """
        self._layout, self._revision, self._held, self._submit = layout, revision, held, submit
        self._permitted: dict[tuple[str, int], _Permitted] = {}
        self._readers = KvReaders(host, self)

    def permit(self, message: KvPermit, tokens: tuple[int, ...]) -> KvPermit:
        """Accept the ticket of a message, and return the message for the next stage."""
        try:
            host, port = self._readers.listen()
        except ThawError as e:
            return message.model_copy(update={"refused": e.message})
        identity = KvIdentity(self._revision, "", message.cache_salt, self._layout)
        ticket = self._readers.get(message.ticket) or Ticket(message.ticket, message.secret, message.request_id, identity)
        permitted = _Permitted(message.sequence, Snapshot(tokens, message.computed))
        self._permitted[message.request_id, message.choice] = permitted
        self._readers.renew(ticket)
        part = KvPart(host=host, port=port, layout=self._layout, selects_layers=True)
        return message.model_copy(update={"parts": (*message.parts, part)})

    def release(self, number: int) -> None:
        """Forget a sequence that the group has dropped."""
        self._permitted = {key: p for key, p in self._permitted.items() if p.sequence != number}

    async def close(self) -> None:
        """Close all connections."""
        await self._readers.close()

    # Reading, from any thread

    def snapshot(self, request_id: str, choice: int) -> Future[Snapshot]:
        return self._submit(lambda: self._find(request_id, choice).snapshot)

    def copy(self, request_id: str, choice: int, piece: Piece) -> Future[memoryview]:
        def work() -> memoryview:
            return read_piece(self._held[self._find(request_id, choice).sequence], piece, self._layout)

        return self._submit(work)

    def _find(self, request_id: str, choice: int) -> _Permitted:
        found = self._permitted.get((request_id, choice))
        if found is None or found.sequence not in self._held:
            raise NotFound(f"Keys and values of request {request_id} are gone: it has ended, or was preempted")
        return found
