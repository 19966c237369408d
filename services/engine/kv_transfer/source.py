"""The source of a transfer: offers, a listener, and a thread for each engine that reads.

A ticket permits its holder to read the keys and values of one request. The engine listens from its
first offer on. A reader asks for ranges of tokens; pieces are copied between two steps of the
engine, a few ahead of the connection, so that a slow reader costs a few MiB and no time.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import secrets
import socket
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotInTime
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, TypeVar

from services.engine.domain.frames import ProtocolError
from services.engine.domain.kv_frames import GREETING, TICKET_BYTES, prove_ticket
from services.engine.domain.kv_pieces import KvIdentity, Piece, PrefixHash, plan_pieces
from services.engine.generation.kv_transfers import KvTransfers, retained_name
from services.engine.kv_transfer.connection import KvConnection
from shared.contracts.kv_transfer import KvLayout, KvOffer, KvPiece, KvPull, KvPulled
from shared.engines.peer_sockets import configure
from shared.engines.secret_proof import NONCE_BYTES, PROOF_BYTES
from shared.errors import EngineFailed, ThawError
from shared.tasks import end

log = logging.getLogger(__name__)
R = TypeVar("R")
HANDSHAKE_WITHIN_S = 5.0
MAX_CALLERS = 16
"""Connections without a proof yet; further ones are closed at once."""
MAX_READERS = 16
"""Connections that read; further ones are closed, and their engines compute instead."""
TICKET_S = 60.0
"""A ticket expires so many seconds after the last offer."""
RETAIN_S = 5.0
"""What a moved request leaves is kept for this long, for the engine that reads it."""
AHEAD = 4
"""Pieces that are copied ahead of the connection."""
_STEP_WITHIN_S = 10.0
_IDLE_S = TICKET_S


class Transferring(Protocol):
    """The engine's batcher."""

    def transfer(self, work: Callable[[KvTransfers], R]) -> Future[R]: ...


@dataclass
class _Ticket:
    """The permission to read one request."""

    ticket: str
    secret: str
    request_id: str
    identity: KvIdentity
    expires: float
    readers: set[KvConnection] = field(default_factory=set)


class KvSource:
    """Offers keys and values of this engine's requests. Its methods run on the event loop."""

    def __init__(self, batcher: Transferring, revision: str, host: str) -> None:
        """Create it. Nothing listens before the first offer.

        Args:
            batcher: Has the keys and values.
            revision: Of the model's weights.
            host: Address to listen on, which other engines can reach.
        """
        self._batcher, self._revision, self._host = batcher, revision, host
        self._tickets: dict[str, _Ticket] = {}
        self._listener: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None
        self._callers: set[asyncio.Task[None]] = set()
        self._lock = threading.Lock()
        self._on_unread: Callable[[], object] | None = None

    async def offer(self, request_id: str, variant: str, cache_salt: str) -> KvOffer:
        """Permit another engine to read a request. Repeated offers have the same ticket.

        Raises:
            ThawError: This engine does not transfer keys and values.
        """
        layout = await asyncio.wrap_future(self._batcher.transfer(KvTransfers.layout))
        now = time.monotonic()
        self._tickets = {t.ticket: t for t in self._tickets.values() if t.expires > now or t.readers}
        found = next((t for t in self._tickets.values() if t.request_id == request_id), None)
        if found is None:
            identity = KvIdentity(self._revision, variant, cache_salt, layout)
            found = _Ticket(secrets.token_hex(TICKET_BYTES), secrets.token_urlsafe(32), request_id, identity, now)
            self._tickets[found.ticket] = found
        found.expires = now + TICKET_S
        host, port = self._listen()
        return KvOffer(host=host, port=port, ticket=found.ticket, secret=found.secret, layout=layout, cache_salt=cache_salt)

    def retain_s(self, request_id: str) -> float:
        """Return how long the keys and values of a request are kept after it has stopped.

        0: no engine reads them.
        """
        with self._lock:
            return RETAIN_S if any(t.request_id == request_id and t.readers for t in self._tickets.values()) else 0.0

    def call_when_unread(self, callback: Callable[[], None]) -> bool:
        """Call `callback` when no engine reads any more, after `RETAIN_S` at the latest.

        False: no engine reads now.
        """
        loop = asyncio.get_running_loop()
        with self._lock:
            if not any(t.readers for t in self._tickets.values()):
                return False
            self._on_unread = lambda: loop.call_soon_threadsafe(callback)
        loop.call_later(RETAIN_S, callback)
        return True

    async def close(self) -> None:
        """Close all connections."""
        if self._accepting is not None:
            await end(self._accepting, *self._callers)
        if self._listener is not None:
            self._listener.close()
        with self._lock:
            readers = [r for t in self._tickets.values() for r in t.readers]
        for reader in readers:
            reader.close()

    # Connections

    def _listen(self) -> tuple[str, int]:
        if self._listener is None:
            family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
            try:
                self._listener = socket.create_server((self._host, 0), family=family, backlog=MAX_CALLERS)
            except OSError as e:
                raise EngineFailed(
                    f"This engine cannot listen on {self._host}: {e.strerror}. Set THAW_STAGE_HOST to an address of this node"
                ) from e
            self._listener.setblocking(False)
            self._accepting = asyncio.create_task(self._accept_forever(self._listener), name="kv-accept")
        shown = socket.gethostname() if self._host in ("0.0.0.0", "::") else self._host
        return shown, self._listener.getsockname()[1]

    async def _accept_forever(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            sock, address = await loop.sock_accept(listener)
            if len(self._callers) >= MAX_CALLERS:
                sock.close()
                continue
            task = asyncio.create_task(self._welcome(sock, address), name="kv-caller")
            self._callers.add(task)
            task.add_done_callback(self._callers.discard)

    async def _welcome(self, sock: socket.socket, address: object) -> None:
        """Let a caller prove that it has a ticket; then serve it in a thread."""
        is_kept = False
        try:
            sock.setblocking(False)
            configure(sock)
            ticket = await self._prove(sock)
            connection = KvConnection(sock)
            with self._lock:
                if sum(len(t.readers) for t in self._tickets.values()) >= MAX_READERS:
                    raise ProtocolError("too many engines read from this one")
                ticket.readers.add(connection)
            threading.Thread(target=self._serve, args=(connection, ticket), name="kv-out", daemon=True).start()
            is_kept = True
        except (ProtocolError, OSError, TimeoutError) as e:
            log.warning("refused a connection for keys and values", extra={"caller": str(address), "error": repr(e)})
        finally:
            if not is_kept:
                sock.close()

    async def _prove(self, sock: socket.socket) -> _Ticket:
        loop, nonce = asyncio.get_running_loop(), secrets.token_bytes(NONCE_BYTES)
        async with asyncio.timeout(HANDSHAKE_WITHIN_S):
            await loop.sock_sendall(sock, GREETING + nonce)
            answer = b""
            while len(answer) < TICKET_BYTES + NONCE_BYTES + PROOF_BYTES:
                got = await loop.sock_recv(sock, TICKET_BYTES + NONCE_BYTES + PROOF_BYTES - len(answer))
                if not got:
                    raise ProtocolError("the other side closed the connection")
                answer += got
            ticket = self._tickets.get(answer[:TICKET_BYTES].hex())
            nonces = nonce, answer[TICKET_BYTES : TICKET_BYTES + NONCE_BYTES]
            proof = answer[TICKET_BYTES + NONCE_BYTES :]
            # An unknown ticket takes as long as a wrong proof.
            known = ticket.secret if ticket is not None else secrets.token_urlsafe(32)
            is_proven = hmac.compare_digest(proof, prove_ticket("caller", answer[:TICKET_BYTES].hex(), known, nonces))
            if ticket is None or not is_proven or ticket.expires < time.monotonic():
                raise ProtocolError("wrong proof, or no such ticket")
            await loop.sock_sendall(sock, prove_ticket("listener", ticket.ticket, ticket.secret, nonces))
        return ticket

    # On the thread of a reader

    def _serve(self, connection: KvConnection, ticket: _Ticket) -> None:
        try:
            while True:
                message = connection.get(0, _IDLE_S).message
                if not isinstance(message, KvPull):
                    raise ProtocolError(f"A reader sent {message.kind!r}")
                ticket.expires = time.monotonic() + TICKET_S
                self._answer(connection, ticket, message)
        except (ProtocolError, OSError, EOFError, NotInTime, ThawError) as e:
            log.debug("a reader of keys and values has ended", extra={"request_id": ticket.request_id, "reason": repr(e)})
        finally:
            with self._lock:
                ticket.readers.discard(connection)
                is_last = not ticket.readers
                on_unread = self._on_unread if not any(t.readers for t in self._tickets.values()) else None
            connection.close()
            if is_last:  # no other engine reads what a moved request has left
                self._batcher.transfer(lambda t: t.discard(retained_name(ticket.request_id)))
            if on_unread is not None:
                with contextlib.suppress(RuntimeError):  # the loop is closed: the process ends
                    on_unread()

    def _answer(self, connection: KvConnection, ticket: _Ticket, pull: KvPull) -> None:
        """Send the pieces of a range, as far as the request has them."""
        try:
            snapshot = self._wait(self._batcher.transfer(lambda t: t.snapshot(ticket.request_id, pull.choice)))
        except ThawError as e:
            connection.send(KvPulled(choice=pull.choice, end=pull.start, reason=e.message))
            return
        until = min(pull.end, snapshot.computed)
        sent, reason = pull.start, "" if until >= pull.end else "they are not computed yet"
        hashes = PrefixHash(ticket.identity, snapshot.tokens)
        layout = ticket.identity.layout
        ahead: deque[tuple[Piece, Future[memoryview]]] = deque()
        pieces = plan_pieces(pull.start, until, layout)
        try:
            while True:
                while len(ahead) < AHEAD and (piece := next(pieces, None)) is not None:
                    copying = partial(KvTransfers.copy, request_id=ticket.request_id, choice=pull.choice, piece=piece)
                    ahead.append((piece, self._batcher.transfer(copying)))
                if not ahead:
                    break
                piece, copied = ahead.popleft()
                self._send_piece(connection, pull.choice, piece, self._wait(copied), hashes)
                if piece.first_layer + piece.layer_count == len(layout.layers):
                    sent = piece.end
        except ThawError as e:
            reason = e.message
        finally:
            for _, future in ahead:
                future.cancel()
        connection.send(KvPulled(choice=pull.choice, end=sent, reason=reason))

    @staticmethod
    def _send_piece(connection: KvConnection, choice: int, piece: Piece, data: memoryview, hashes: PrefixHash) -> None:
        message = KvPiece(
            choice=choice,
            start=piece.start,
            end=piece.end,
            first_layer=piece.first_layer,
            layer_count=piece.layer_count,
            prefix_hash=hashes.up_to(piece.end),
            checksum=zlib.crc32(data),
        )
        connection.send(message, data)

    @staticmethod
    def _wait(future: Future[R]) -> R:
        try:
            return future.result(_STEP_WITHIN_S)
        finally:
            future.cancel()


def layout_difference(own: KvLayout, other: KvLayout) -> str:
    """Return why keys and values of `other` cannot be used with `own`; empty: they can."""
    if own == other:
        return ""
    for name in ("version", "dtype", "byte_order", "layers"):
        if getattr(own, name) != getattr(other, name):
            return f"the engines store keys and values differently ({name})"
    return "the engines store keys and values differently"
