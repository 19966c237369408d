"""The destination of a transfer: connects to the source, and stores what it can verify.

A group in stages has a source for each stage. They send their layers at the same time, each over a
connection of its own, and a token counts as received when all its layers are there. A stage of a
group as destination asks for its own layers only (`group_destination`).

Whatever fails, the rest of the sequences is computed: no error leaves this module.
"""

from __future__ import annotations

import hmac
import logging
import secrets
import socket
import threading
import time
from collections import deque
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from concurrent.futures import TimeoutError as NotInTime
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

from services.engine.domain.frames import ProtocolError
from services.engine.domain.kv_frames import GREETING, prove_ticket
from services.engine.domain.kv_pieces import PIECE_BYTES, KvIdentity, Piece, PrefixHash, pull_tokens
from services.engine.domain.step_planning import BLOCK_TOKENS
from services.engine.generation.kv_transfers import KvTransfers
from services.engine.kv_transfer.arrivals import Expected, NotTransferred, Selection, match_parts, verify_content
from services.engine.kv_transfer.connection import KvConnection
from services.engine.kv_transfer.source import Transferring
from shared.contracts.kv_transfer import KvLayout, KvOffer, KvPart, KvPull, KvPulled
from shared.contracts.stages import MAX_STAGES
from shared.engines.peer_sockets import configure, receive
from shared.engines.secret_proof import NONCE_BYTES, PROOF_BYTES
from shared.errors import ThawError

log = logging.getLogger(__name__)
CONNECT_WITHIN_S = 1.0
STALL_S = 2.0
"""A source that sends nothing for this long is given up."""
KEPT_CONNECTIONS = 64
MAX_TRANSFERS = 8
"""Transfers that are received at the same time; more wait."""
_STORES_AHEAD = 4
STEP_WITHIN_S = 10.0
"""A step of this engine may take so long."""


class Storing(Protocol):
    """Stores keys and values between two steps of an engine. Called from any thread."""

    def layout(self) -> Future[KvLayout]:
        """Return how this engine stores keys and values."""
        ...

    def store(self, number: int, index: int, piece: Piece, data: bytearray) -> Future[None]:
        """Store a piece of one sequence.

        Args:
            number: The order's number.
            index: The sequence's index in the order.
            piece: The range of tokens and layers.
            data: Its bytes.

        Returns:
            A future that raises `ThawError` if the sequence is not received any more.
        """
        ...


class BatcherStore:
    """Stores in the sequences of a batcher."""

    def __init__(self, batcher: Transferring) -> None:
        self._batcher = batcher

    def layout(self) -> Future[KvLayout]:
        return self._batcher.transfer(KvTransfers.layout)

    def store(self, number: int, index: int, piece: Piece, data: bytearray) -> Future[None]:
        return self._batcher.transfer(lambda t: t.store(number, index, piece, data))


@dataclass(frozen=True)
class Wanted:
    """One sequence of an order.

    Attributes:
        choice: Its choice in the request.
        tokens: Of which all but the last need keys and values.
        computed: Tokens that it has already.
        index: Of the sequence in the order.
    """

    choice: int
    tokens: tuple[int, ...]
    computed: int
    index: int = 0

    @property
    def end(self) -> int:
        return len(self.tokens) - 1


@dataclass
class Transfer:
    """The transfer for one order.

    Attributes:
        name: Of the prepared sequences.
        number: Of the order.
        variant: Revision of the LoRA adapter.
        within_s: Seconds after which no further range is asked for.
        stall_s: Seconds that the source may send nothing.
        tokens: Received so far.
        nbytes: Received so far.
    """

    name: str
    number: int
    variant: str
    within_s: float
    stall_s: float = STALL_S
    tokens: int = 0
    nbytes: int = 0
    is_stopped: bool = False
    _source: Source | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def use(self, source: Source | None) -> None:
        """Close these connections if the transfer is stopped.

        Raises:
            NotTransferred: It was stopped before.
        """
        with self._lock:
            self._source = source
            if source is not None and self.is_stopped:
                raise NotTransferred("the transfer was ended")

    def stop(self) -> None:
        """End the transfer: it fails soon, if it is not over. Called from any thread."""
        with self._lock:
            self.is_stopped, source = True, self._source
        if source is not None:
            source.close()

    def count(self, nbytes: int) -> None:
        """Count received bytes. Called from any thread."""
        with self._lock:
            self.nbytes += nbytes


@dataclass(frozen=True)
class Received:
    """The outcome of a transfer.

    Attributes:
        reason: Why it ended early; empty: it did not.
    """

    tokens: int = 0
    nbytes: int = 0
    took_ms: float = 0.0
    reason: str = ""


@dataclass(frozen=True)
class Part:
    """A connection to a process that has some layers.

    Attributes:
        identity: Of its keys and values; the layout has the wanted layers only.
        first_layer: Position of the first one in the layout of this engine.
        selection: The wanted layers.
    """

    identity: KvIdentity
    first_layer: int
    selection: Selection
    connection: KvConnection


@dataclass(frozen=True)
class Source:
    """An offer that was checked, and connections to all its parts."""

    layout: KvLayout
    parts: tuple[Part, ...]

    def close(self) -> None:
        """Close the connections, and wake the threads that use them."""
        for part in self.parts:
            part.connection.close()


class KvDestination:
    """Receives keys and values for prepared sequences. `receive` runs in a thread of its own."""

    def __init__(self, store: Storing, revision: str, *, is_stage: bool = False) -> None:
        """Create it.

        Args:
            store: Stores what is received.
            revision: Of the model's weights.
            is_stage: This engine has a part of the model's layers only.
        """
        self._store, self._revision, self._is_stage = store, revision, is_stage
        self._kept: dict[str, Source] = {}
        self._active: list[Transfer] = []
        self._lock = threading.Lock()
        self._is_closed = False
        self._threads = ThreadPoolExecutor(MAX_TRANSFERS * MAX_STAGES, thread_name_prefix="kv-part")

    def has_source(self, name: str) -> bool:
        """True if more can be received for the sequences of this name."""
        return name in self._kept

    def receive(self, transfer: Transfer, wanted: list[Wanted], offer: KvOffer | None) -> Received:
        """Receive what the sequences lack. Never raises.

        Args:
            transfer: The order that they belong to.
            wanted: Its sequences, in their order.
            offer: Of the source; None: the one of the last call for this name.
        """
        began = time.monotonic()
        reason, source = "", self._take(transfer.name, transfer)
        try:
            if all(w.computed >= w.end for w in wanted):
                return Received()
            if source is None:
                if offer is None:
                    raise NotTransferred("there is no source")
                source = self._connect(offer, transfer.variant)
            transfer.use(source)
            for sequence in wanted:
                self._receive_sequence(source, transfer, sequence, began + transfer.within_s)
        except (NotTransferred, ProtocolError, NotInTime, OSError, EOFError, ThawError) as e:
            reason = str(e) or type(e).__name__
            log.info("keys and values are computed, not received", extra={"prepared": transfer.name, "reason": reason})
        except Exception as e:  # a boundary to the device, whose memory may be full: the sequences are computed
            reason = f"{type(e).__name__}: {str(e)[:300]}"
            log.exception("failed to receive keys and values", extra={"prepared": transfer.name})
        finally:
            transfer.use(None)
            self._end(transfer, source, is_usable=not reason and not transfer.is_stopped)
        return Received(transfer.tokens, transfer.nbytes, (time.monotonic() - began) * 1e3, reason)

    def forget(self, name: str) -> None:
        """Close the connection that was kept for the sequences of this name."""
        source = self._take(name)
        if source is not None:
            source.close()

    def close(self) -> None:
        """Close all connections."""
        with self._lock:
            self._is_closed = True
            sources, self._kept = list(self._kept.values()), {}
            active = list(self._active)
        for source in sources:
            source.close()
        for transfer in active:
            transfer.stop()
        self._threads.shutdown(wait=False)

    # Connections

    def _take(self, name: str, transfer: Transfer | None = None) -> Source | None:
        with self._lock:
            if transfer is not None:
                self._active.append(transfer)
                transfer.is_stopped |= self._is_closed
            return self._kept.pop(name, None)

    def _end(self, transfer: Transfer, source: Source | None, *, is_usable: bool) -> None:
        """Keep the connections for the rest of the sequences, which is generated meanwhile."""
        dropped = [source] if source is not None else []
        with self._lock:
            self._active.remove(transfer)
            if source is not None and is_usable and not self._is_closed:
                self._kept[transfer.name] = source
                oldest = list(self._kept)[: max(0, len(self._kept) - KEPT_CONNECTIONS)]
                dropped = [self._kept.pop(n) for n in oldest]
        for each in dropped:
            each.close()

    def _connect(self, offer: KvOffer, variant: str) -> Source:
        layout = self._store.layout().result(STEP_WITHIN_S)
        parts: list[Part] = []
        try:
            for selection in match_parts(layout, offer, is_stage=self._is_stage):
                identity = KvIdentity(self._revision, variant, offer.cache_salt, selection.layout)
                first_layer = sum(len(p.identity.layout.layers) for p in parts)
                parts.append(Part(identity, first_layer, selection, self._connect_part(offer, selection.part)))
        except BaseException:
            for connected in parts:
                connected.connection.close()
            raise
        return Source(layout, tuple(parts))

    @staticmethod
    def _connect_part(offer: KvOffer, part: KvPart) -> KvConnection:
        """Connect to one process, and let both sides prove that they know the ticket's secret."""
        sock = socket.create_connection((part.host, part.port), timeout=CONNECT_WITHIN_S)
        try:
            configure(sock)
            greeting = bytes(receive(sock, len(GREETING) + NONCE_BYTES))
            if not greeting.startswith(GREETING):
                raise NotTransferred(f"{part.host}:{part.port} is no engine of this version")
            nonces = greeting[len(GREETING) :], secrets.token_bytes(NONCE_BYTES)
            proof = prove_ticket("caller", offer.ticket, offer.secret, nonces)
            sock.sendall(bytes.fromhex(offer.ticket) + nonces[1] + proof)
            expected = prove_ticket("listener", offer.ticket, offer.secret, nonces)
            if not hmac.compare_digest(bytes(receive(sock, PROOF_BYTES)), expected):
                raise NotTransferred(f"{part.host}:{part.port} does not know the secret of the offer")
        except BaseException:
            sock.close()
            raise
        return KvConnection(sock)

    # Pieces

    def _receive_sequence(self, source: Source, transfer: Transfer, wanted: Wanted, deadline: float) -> None:
        hashes = [PrefixHash(part.identity, wanted.tokens) for part in source.parts]
        most, at = pull_tokens(source.layout), wanted.computed
        while at < wanted.end and (time.monotonic() < deadline or not transfer.nbytes):
            until = min(wanted.end, (at // BLOCK_TOKENS) * BLOCK_TOKENS + most)
            asked = KvPull(choice=wanted.choice, start=at, end=until)
            reached = self._receive_range(source, transfer, wanted.index, asked, hashes)
            transfer.tokens += reached - at
            if reached < until:
                return  # the source computes its prompt, or was preempted: the rest is computed here
            at = reached

    def _receive_range(self, source: Source, transfer: Transfer, index: int, asked: KvPull, hashes: list[PrefixHash]) -> int:
        """Store the pieces of a range, and return the token up to which all parts are there.

        The first part that fails ends the others.
        """
        receive_part = partial(self._receive_part, transfer, index, asked)
        if len(source.parts) == 1:
            return receive_part(source.parts[0], hashes[0])
        try:
            jobs = [self._threads.submit(receive_part, *each) for each in zip(source.parts, hashes, strict=True)]
        except RuntimeError as e:  # after `close`
            raise NotTransferred("this engine ends") from e
        done, others = wait(jobs, return_when=FIRST_EXCEPTION)
        if failed := next((job for job in done if job.exception() is not None), None):
            source.close()
            wait(others)
            failed.result()
        return min(job.result() for job in jobs)

    def _receive_part(self, transfer: Transfer, index: int, asked: KvPull, part: Part, hashes: PrefixHash) -> int:
        """Store the pieces that one part sends of a range, and return the token that they reach."""
        selected = {"first_layer": part.selection.first_layer, "layer_count": part.selection.layer_count}
        part.connection.send(asked.model_copy(update=selected))
        layout = part.identity.layout
        most_bytes = max(PIECE_BYTES, max(layout.layer_bytes) * BLOCK_TOKENS)
        expected = Expected(layout, asked.choice, asked.start, asked.end)
        stores: deque[Future[None]] = deque()
        try:
            while True:
                frame = part.connection.get(most_bytes, transfer.stall_s)
                if isinstance(frame.message, KvPulled):
                    while stores:
                        stores.popleft().result(STEP_WITHIN_S)
                    return expected.start
                piece = expected.take(frame)
                verify_content(frame, hashes.up_to(piece.end))
                place = replace(piece, first_layer=part.first_layer + piece.first_layer)
                stores.append(self._store.store(transfer.number, index, place, frame.data))
                transfer.count(len(frame.data))
                while len(stores) > _STORES_AHEAD:
                    stores.popleft().result(STEP_WITHIN_S)
        finally:
            for future in stores:
                future.cancel()
