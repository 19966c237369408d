"""Reads and writes keys and values between two steps, for transfers between engines.

All methods run on the computing thread (`Batcher.transfer`). They return copies: no
transfer keeps a sequence's memory from being freed or lent.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Many
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import torch

from services.engine.domain.kv_pieces import Piece
from services.engine.domain.step_planning import BLOCK_TOKENS, blocks_for
from services.engine.generation.kv_bytes import layout_of, read_piece, write_piece
from services.engine.generation.kv_cache import SequenceKV
from services.engine.generation.prepared_prefixes import PreparedPrefixes, PreparedSequence
from services.engine.generation.runner import Runner, RunnerLost
from services.engine.generation.sequences import Sequence
from shared.contracts.kv_transfer import KvLayout, KvOffer, KvPart
from shared.errors import EngineFailed, InsufficientMemory, NotFound, ThawError, UnsupportedParameter


@runtime_checkable
class KvRunner(Protocol):
    """A runner whose states are a `SequenceKV`.

    - `warm_up` returns a state with a few tokens.
    """

    @property
    def device(self) -> torch.device: ...
    def new_state(self) -> SequenceKV: ...
    def warm_up(self) -> SequenceKV: ...


@dataclass(frozen=True)
class Permission:
    """The permission of another engine to read a request's keys and values.

    Attributes:
        ticket: Names the permission.
        secret: Proves that the reader has the ticket.
    """

    request_id: str
    ticket: str
    secret: str
    cache_salt: str


@dataclass(frozen=True)
class PermittedSequence:
    """A choice of such a request: its tokens, and how many of them are computed."""

    choice: int
    tokens: Many[int]
    computed: int
    state: SequenceKV


@dataclass(frozen=True)
class GroupOrder:
    """An order to all stages of a group: receive the keys and values of one sequence.

    Attributes:
        choice: Of the sequence in the source's request.
        start: Tokens that every stage has already.
        end: Tokens whose keys and values are wanted.
        within_s: Seconds after which no further range is asked for.
        stall_s: Seconds that the source may send nothing.
        on_failed: Called from any thread when a later stage reports that its transfer has failed.
    """

    offer: KvOffer
    choice: int
    tokens: tuple[int, ...]
    start: int
    end: int
    within_s: float
    stall_s: float
    on_failed: Callable[[], None]


class Receipt(Protocol):
    """The reports of the later stages on an order. Used from any thread."""

    @property
    def order(self) -> GroupOrder: ...

    @property
    def failure(self) -> str:
        """The error of the first stage that failed; empty: none has failed."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes received by the stages that have reported."""
        ...

    def wait(self, timeout_s: float) -> tuple[int, ...]:
        """Return the tokens that each later stage has.

        Raises:
            EngineFailed: A stage does not report within `timeout_s`.
        """
        ...

    def stop(self) -> None:
        """End the transfer, and close the connections that are kept for the next order."""
        ...


@runtime_checkable
class StagedRunner(Protocol):
    """The runner of a group's first stage: later stages have the other layers (ADR 0093)."""

    def permit(self, permission: Permission, sequences: Many[PermittedSequence]) -> tuple[KvPart, ...]:
        """Permit an engine to read the sequences from the later stages, and return where."""
        ...

    def receive(self, state: SequenceKV, order: GroupOrder) -> Receipt:
        """Order the later stages to receive their layers of a sequence (ADR 0094)."""
        ...


@dataclass(frozen=True)
class Snapshot:
    """A sequence's tokens, and how many of them have keys and values."""

    tokens: tuple[int, ...]
    computed: int


def retained_name(request_id: str) -> str:
    """Return the name under which the sequences of a yielded request are kept."""
    return f"yielded {request_id}"


class KvTransfers:
    """The keys and values of one engine."""

    def __init__(
        self,
        runner: Runner | None,
        prepared: PreparedPrefixes,
        sequences: Callable[[], Iterable[Sequence]],
        free_blocks: Callable[[], int],
    ) -> None:
        """Create it.

        Args:
            runner: Computes the sequences; None: the model only embeds.
            prepared: Sequences that are received, or retained.
            sequences: Returns the sequences of all requests.
            free_blocks: Returns the blocks of the KV cache that nothing uses.
        """
        self._runner, self._prepared = runner, prepared
        self._sequences, self._free_blocks = sequences, free_blocks
        self._layout: KvLayout | None = None
        self._permissions: dict[str, Permission] = {}

    def layout(self) -> KvLayout:
        """Return how keys and values are stored. The first call computes a few tokens.

        Raises:
            UnsupportedParameter: They cannot be transferred.
        """
        if self._layout is None:
            self._layout = layout_of(self._capable().warm_up())
        return self._layout

    def _capable(self) -> KvRunner:
        runner: object = self._runner
        if not isinstance(runner, KvRunner):
            raise UnsupportedParameter("This engine does not transfer keys and values", param="kv")
        return runner

    # Source

    def snapshot(self, request_id: str, choice: int) -> Snapshot:
        """Describe a sequence of a running, waiting or retained request.

        Raises:
            NotFound: The request is over.
        """
        tokens, computed, _ = self._find(request_id, choice)
        return Snapshot(tuple(tokens), computed)

    def copy(self, request_id: str, choice: int, piece: Piece) -> memoryview:
        """Return the bytes of a piece.

        Raises:
            NotFound: The request is over, or was preempted.
        """
        _, computed, state = self._find(request_id, choice)
        if state is None or computed < piece.end:
            raise NotFound(f"Keys and values of request {request_id} are gone: it was preempted")
        return read_piece(state, piece, self.layout())

    def permit(self, permission: Permission) -> tuple[KvPart, ...]:
        """Let an engine read a request at the later stages of a group, and return where.

        Nothing: this engine has all layers.

        Raises:
            NotFound: Nothing is computed, or the request is over.
            ThawError: A stage cannot be read.
        """
        runner: object = self._runner
        if not isinstance(runner, StagedRunner):
            return ()
        own = [s for s in self._sequences() if s.request.request_id == permission.request_id and s.state is not None]
        if not own:
            raise NotFound(f"Request {permission.request_id} has no keys and values here")
        live = {s.request.request_id for s in self._sequences()}
        self._permissions = {i: p for i, p in self._permissions.items() if i in live} | {permission.request_id: permission}
        try:
            return runner.permit(permission, [PermittedSequence(s.choice.index, s.tokens, s.computed, s.state) for s in own])
        except RunnerLost as e:  # the next step ends the engine
            raise EngineFailed(str(e)) from e

    def _find(self, request_id: str, choice: int) -> tuple[Iterable[int], int, SequenceKV | None]:
        for s in self._sequences():
            if (s.request.request_id, s.choice.index) == (request_id, choice):
                return s.tokens, s.computed, s.state
        for kept in self._prepared.find_retained(retained_name(request_id)):
            if kept.choice == choice:
                return kept.tokens, kept.computed, kept.state
        raise NotFound(f"Request {request_id} has no choice {choice} here any more")

    def retain(self, request_id: str, keep_s: float) -> None:
        """Keep the sequences of a request that stops now, for the engine that resumes it.

        Later stages get its last tokens.
        """
        if (permission := self._permissions.get(request_id)) is not None:
            with contextlib.suppress(ThawError):  # the rest is recomputed
                self.permit(permission)
        own = [s for s in self._sequences() if s.request.request_id == request_id and s.computed]
        if own:
            parts = [PreparedSequence(tuple(s.tokens), s.state, s.computed, choice=s.choice.index) for s in own]
            self._prepared.retain(retained_name(request_id), own[0].request.variant, parts, keep_s)

    # Destination

    def store(self, number: int, index: int, piece: Piece, data: bytearray) -> None:
        """Store a piece of a sequence that an order has accepted.

        In a group it counts when all stages have it (`settle`).

        Args:
            number: Of the order.
            index: Of the sequence in the order.
            piece: It begins where the keys and values of its layers end.
            data: The bytes; they are copied.

        Raises:
            NotFound: The sequence is not received any more.
            InsufficientMemory: Requests need the memory.
        """
        part = self._prepared.find_receiving(number, index)
        if part is None:
            raise NotFound("The prepared sequences were discarded")
        runner, layout = self._capable(), self.layout()
        if part.state is None:
            part.state = runner.new_state()
        part.ends = part.ends or [part.computed] * len(layout.layers)
        if any(end != piece.start for end in part.ends[piece.layers]):
            raise NotFound("The prepared sequences were discarded")
        if blocks_for(piece.end) - part.blocks > self._free_blocks():
            raise InsufficientMemory("Running requests need the memory of the prepared sequences")
        part.written = max(part.written, piece.end)
        write_piece(part.state, piece, layout, data, runner.device)
        part.ends[piece.layers] = [piece.end] * piece.layer_count
        if not isinstance(runner, StagedRunner):
            self._prepared.record_received(number, index, min(part.ends))

    def receive_in_group(self, number: int, index: int, order: GroupOrder) -> Receipt:
        """Order the later stages to receive a sequence that an order has accepted.

        The memory for it is reserved. If not all of it is free, fewer tokens are ordered.

        Args:
            number: Of the order.
            index: Of the sequence in the order.
            order: Its `start` and `end` are replaced.

        Raises:
            NotFound: The sequence is not received any more.
            InsufficientMemory: Requests need the memory.
            UnsupportedParameter: A stage does not receive keys and values.
            EngineFailed: A stage has ended.
        """
        runner: object = self._capable()
        if not isinstance(runner, StagedRunner):
            raise UnsupportedParameter("This engine is no group", param="kv")
        part = self._prepared.find_receiving(number, index)
        if part is None:
            raise NotFound("The prepared sequences were discarded")
        end = min(len(part.tokens) - 1, (part.blocks + max(0, self._free_blocks())) * BLOCK_TOKENS)
        if end <= part.computed:
            raise InsufficientMemory("Running requests need the memory of the prepared sequences")
        if part.state is None:
            part.state = self._capable().new_state()
        part.ends = [part.computed] * len(self.layout().layers)
        part.written = max(part.written, end)
        try:
            return runner.receive(part.state, replace(order, start=part.computed, end=end))
        except RunnerLost as e:  # the next step ends the engine
            raise EngineFailed(str(e)) from e

    def settle(self, number: int, index: int, others: Many[int]) -> int:
        """Count the tokens that all stages of the group have, and return their number.

        Args:
            others: Tokens that each later stage has.

        Raises:
            NotFound: The sequence is not received any more.
        """
        part = self._prepared.find_receiving(number, index)
        if part is None:
            raise NotFound("The prepared sequences were discarded")
        end = max(part.computed, min((*part.ends, *others)))
        self._prepared.record_received(number, index, end)
        return end

    def end_receiving(self, number: int) -> None:
        """Have the rest of an order computed."""
        self._prepared.end_receiving(number)

    def discard(self, name: str) -> None:
        """Discard what is kept as `name`. Unknown names are ignored."""
        self._prepared.forget(name)
