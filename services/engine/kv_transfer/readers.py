"""The engines that read from this one: tickets, a listener, and a thread for each reader.

A ticket permits its holder to read the keys and values of one request. A reader asks for ranges of
tokens; pieces are copied between two steps of the engine, a few ahead of the connection, so that a
slow reader costs a few MiB and no time.
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
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeVar

from services.engine.domain.frames import ProtocolError
from services.engine.domain.kv_frames import GREETING, TICKET_BYTES, prove_ticket
from services.engine.domain.kv_pieces import KvIdentity, Piece, PrefixHash, plan_pieces
from services.engine.generation.kv_transfers import Snapshot
from services.engine.kv_transfer.connection import KvConnection
from shared.contracts.kv_transfer import KvLayout, KvPiece, KvPull, KvPulled
from shared.engines.peer_sockets import configure
from shared.engines.secret_proof import NONCE_BYTES, PROOF_BYTES
from shared.errors import EngineFailed, ThawError
from shared.tasks import end

log = logging.getLogger(__name__)
R = TypeVar("R")
HANDSHAKE_WITHIN_S = 5.0
MAX_CALLERS = 16
"""Connections without a proof yet; further ones are closed at once."""
MAX_READERS = 32
"""Connections that read; further ones are closed, and their engines compute instead.

A migrator moves four requests at once; each stage of the largest group reads over its own.
"""
TICKET_S = 60.0
"""A ticket expires so many seconds after it was renewed or used last."""
AHEAD = 4
"""Pieces that are copied ahead of the connection."""
_STEP_WITHIN_S = 10.0
_IDLE_S = TICKET_S
_RETRY_S = 0.5
"""Pause after a connection could not be accepted."""


class Reading(Protocol):
    """Reads keys and values of this engine's requests between two steps, for any thread.

    The futures raise `NotFound` if the request has none any more.
    """

    def snapshot(self, request_id: str, choice: int) -> Future[Snapshot]: ...
    def copy(self, request_id: str, choice: int, piece: Piece) -> Future[memoryview]: ...


@dataclass
class Ticket:
    """The permission to read one request."""

    ticket: str
    secret: str
    request_id: str
    identity: KvIdentity
    expires: float = 0.0
    readers: set[KvConnection] = field(default_factory=set)


class KvReaders:
    """Sends keys and values to engines that have a ticket. Nothing listens before `listen`."""

    def __init__(self, host: str, reading: Reading, on_unread: Callable[[Ticket], None] = lambda ticket: None) -> None:
        """Create it on the event loop.

        Args:
            host: Address to listen on, which other engines can reach.
            reading: Has the keys and values.
            on_unread: Called from any thread when no engine reads a request any more.
        """
        self._host, self._reading, self._on_unread = host, reading, on_unread
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._tickets: dict[str, Ticket] = {}
        self._listener: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None
        self._callers: set[asyncio.Task[None]] = set()
        self._on_idle: Callable[[], object] | None = None
        self._is_closed = False

    # Tickets: from any thread

    def get(self, ticket: str) -> Ticket | None:
        """Return the ticket of this name."""
        with self._lock:
            return self._tickets.get(ticket)

    def find(self, request_id: str) -> Ticket | None:
        """Return the ticket of a request."""
        with self._lock:
            return next((t for t in self._tickets.values() if t.request_id == request_id), None)

    def renew(self, ticket: Ticket) -> None:
        """Accept a ticket for `TICKET_S` seconds. Drops expired ones."""
        now = time.monotonic()
        with self._lock:
            ticket.expires = now + TICKET_S
            self._tickets = {t.ticket: t for t in self._tickets.values() if t.expires > now or t.readers} | {ticket.ticket: ticket}

    def is_read(self, request_id: str) -> bool:
        """True if an engine reads the request now."""
        with self._lock:
            return any(t.request_id == request_id and t.readers for t in self._tickets.values())

    def call_when_idle(self, callback: Callable[[], object]) -> bool:
        """Call `callback`, on any thread, when no engine reads any more. False: none reads now."""
        with self._lock:
            if not any(t.readers for t in self._tickets.values()):
                return False
            self._on_idle = callback
        return True

    # Connections

    def listen(self) -> tuple[str, int]:
        """Listen, from the first call on, and return host and port. May be called from any thread.

        Raises:
            EngineFailed: The host is not an address of this machine.
        """
        with self._lock:
            if self._listener is None:
                self._listener = self._open_listener()
            shown = socket.gethostname() if self._host in ("0.0.0.0", "::") else self._host
            return shown, self._listener.getsockname()[1]

    def _open_listener(self) -> socket.socket:
        if self._is_closed:
            raise EngineFailed("This engine ends")
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        try:
            listener = socket.create_server((self._host, 0), family=family, backlog=MAX_CALLERS)
        except OSError as e:
            raise EngineFailed(
                f"This engine cannot listen on {self._host}: {e.strerror}. Set THAW_STAGE_HOST to an address of this node"
            ) from e
        listener.setblocking(False)
        self._loop.call_soon_threadsafe(self._begin_accepting, listener)
        return listener

    def _begin_accepting(self, listener: socket.socket) -> None:
        if not self._is_closed:
            self._accepting = asyncio.create_task(self._accept_forever(listener), name="kv-accept")

    async def close(self) -> None:
        """Close all connections."""
        self._is_closed = True
        if self._accepting is not None:
            await end(self._accepting, *self._callers)
        with self._lock:
            readers = [r for t in self._tickets.values() for r in t.readers]
            if self._listener is not None:
                self._listener.close()
        for reader in readers:
            reader.close()

    async def _accept_forever(self, listener: socket.socket) -> None:
        while True:
            try:
                sock, address = await self._loop.sock_accept(listener)
            except OSError as e:  # no file descriptor is left, or the caller has gone
                log.warning("failed to accept a connection; retrying", extra={"error": repr(e), "retry_s": _RETRY_S})
                await asyncio.sleep(_RETRY_S)
                continue
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
            try:
                threading.Thread(target=self._serve, args=(connection, ticket), name="kv-out", daemon=True).start()
            except RuntimeError as e:
                with self._lock:
                    ticket.readers.discard(connection)
                raise ProtocolError("no thread can be started") from e
            is_kept = True
        except (ProtocolError, OSError, TimeoutError) as e:
            log.warning("refused a connection for keys and values", extra={"caller": str(address), "error": repr(e)})
        finally:
            if not is_kept:
                sock.close()

    async def _prove(self, sock: socket.socket) -> Ticket:
        loop, nonce = self._loop, secrets.token_bytes(NONCE_BYTES)
        async with asyncio.timeout(HANDSHAKE_WITHIN_S):
            await loop.sock_sendall(sock, GREETING + nonce)
            answer = b""
            while len(answer) < TICKET_BYTES + NONCE_BYTES + PROOF_BYTES:
                got = await loop.sock_recv(sock, TICKET_BYTES + NONCE_BYTES + PROOF_BYTES - len(answer))
                if not got:
                    raise ProtocolError("the other side closed the connection")
                answer += got
            with self._lock:
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

    def _serve(self, connection: KvConnection, ticket: Ticket) -> None:
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
                on_idle = self._on_idle if not any(t.readers for t in self._tickets.values()) else None
            connection.close()
            if is_last:
                self._on_unread(ticket)
            if on_idle is not None:
                with contextlib.suppress(RuntimeError):  # the loop is closed: the process ends
                    on_idle()

    def _answer(self, connection: KvConnection, ticket: Ticket, pull: KvPull) -> None:
        """Send the pieces of a range, as far as the request has them."""
        try:
            snapshot = self._wait(self._reading.snapshot(ticket.request_id, pull.choice))
        except ThawError as e:
            connection.send(KvPulled(choice=pull.choice, end=pull.start, reason=e.message))
            return
        until = min(pull.end, snapshot.computed)
        sent, reason = pull.start, "" if until >= pull.end else "they are not computed yet"
        layout = _select_layers(ticket.identity.layout, pull)
        hashes = PrefixHash(replace(ticket.identity, layout=layout), snapshot.tokens)
        ahead: deque[tuple[Piece, Future[memoryview]]] = deque()
        pieces = plan_pieces(pull.start, until, layout)
        try:
            while True:
                while len(ahead) < AHEAD and (piece := next(pieces, None)) is not None:
                    place = replace(piece, first_layer=pull.first_layer + piece.first_layer)
                    ahead.append((piece, self._reading.copy(ticket.request_id, pull.choice, place)))
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


def _select_layers(layout: KvLayout, pull: KvPull) -> KvLayout:
    """Return the layout of the layers that are asked for.

    Raises:
        ProtocolError: There are no such layers.
    """
    count = len(layout.layers) - pull.first_layer if pull.layer_count is None else pull.layer_count
    if count < 1 or pull.first_layer + count > len(layout.layers):
        raise ProtocolError(f"A reader asked for layers from {pull.first_layer} on, and there are {len(layout.layers)}")
    return layout.select(pull.first_layer, count)
