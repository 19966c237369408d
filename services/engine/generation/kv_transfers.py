"""Reads and writes keys and values between two steps, for transfers between engines.

All methods run on the computing thread (`Batcher.transfer`). What they return is a copy: no
transfer keeps a sequence's memory from being freed or lent.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch

from services.engine.domain.kv_pieces import Piece
from services.engine.domain.step_planning import blocks_for
from services.engine.generation.kv_cache import SequenceKV
from services.engine.generation.prepared_prefixes import PreparedPrefixes, PreparedSequence
from services.engine.generation.runner import WARM_UP, Row, Runner
from services.engine.generation.sequences import Sequence
from shared.contracts.kv_transfer import KvLayer, KvLayout
from shared.errors import InsufficientMemory, NotFound, UnsupportedParameter


@runtime_checkable
class KvRunner(Protocol):
    """A runner whose states are a `SequenceKV` with all layers of the model."""

    @property
    def device(self) -> torch.device: ...
    def new_state(self) -> SequenceKV: ...


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

    def layout(self) -> KvLayout:
        """Return how keys and values are stored. The first call computes a few tokens.

        Raises:
            UnsupportedParameter: They cannot be transferred.
        """
        if self._layout is None:
            state = self._capable().new_state()
            assert self._runner is not None
            self._runner.forward([Row(state, 0, WARM_UP)])
            held = state.layers
            (dtype,) = {t.dtype for t in held.values()}
            layers = tuple(KvLayer(layer=i, heads=t.shape[1], head_size=t.shape[3]) for i, t in held.items())
            name, order = str(dtype).removeprefix("torch."), sys.byteorder
            self._layout = KvLayout(dtype=name, itemsize=dtype.itemsize, byte_order=order, layers=layers)
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

    @torch.inference_mode()
    def copy(self, request_id: str, choice: int, piece: Piece) -> memoryview:
        """Return the bytes of a piece.

        Raises:
            NotFound: The request is over, or was preempted.
        """
        _, computed, state = self._find(request_id, choice)
        if state is None or computed < piece.end:
            raise NotFound(f"Keys and values of request {request_id} are gone: it was preempted")
        layout = self.layout()
        data = bytearray(piece.size_bytes(layout))
        at = 0
        for layer in layout.layers[piece.layers]:
            copied: Any = state.copy_range(layer.layer, piece.start, piece.end).view(torch.uint8).reshape(-1).numpy()
            data[at : at + copied.nbytes] = memoryview(copied)
            at += copied.nbytes
        return memoryview(data)

    def _find(self, request_id: str, choice: int) -> tuple[Iterable[int], int, SequenceKV | None]:
        for s in self._sequences():
            if (s.request.request_id, s.choice.index) == (request_id, choice):
                return s.tokens, s.computed, s.state
        for kept in self._prepared.find_retained(retained_name(request_id)):
            if kept.choice == choice:
                return kept.tokens, kept.computed, kept.state
        raise NotFound(f"Request {request_id} has no choice {choice} here any more")

    def retain(self, request_id: str, keep_s: float) -> None:
        """Keep the sequences of a request that stops now, for the engine that resumes it."""
        own = [s for s in self._sequences() if s.request.request_id == request_id and s.computed]
        if own:
            parts = [PreparedSequence(tuple(s.tokens), s.state, s.computed, choice=s.choice.index) for s in own]
            self._prepared.retain(retained_name(request_id), own[0].request.variant, parts, keep_s)

    # Destination

    @torch.inference_mode()
    def store(self, number: int, index: int, piece: Piece, data: bytearray) -> None:
        """Store a piece of a sequence that an order has accepted.

        Args:
            number: Of the order.
            index: Of the sequence in the order.
            piece: It begins where the sequence's keys and values end.
            data: The bytes; they are copied.

        Raises:
            NotFound: The sequence is not received any more.
            InsufficientMemory: Requests need the memory.
        """
        part = self._prepared.find_receiving(number, index)
        if part is None or part.computed != piece.start:
            raise NotFound("The prepared sequences were discarded")
        runner, layout = self._capable(), self.layout()
        if part.state is None:
            part.state = runner.new_state()
        if blocks_for(piece.end) - part.blocks > self._free_blocks():
            raise InsufficientMemory("Running requests need the memory of the prepared sequences")
        part.written = max(part.written, piece.end)
        at, tokens, dtype = 0, piece.end - piece.start, getattr(torch, layout.dtype)
        for layer, token_bytes in zip(layout.layers[piece.layers], layout.layer_bytes[piece.layers], strict=True):
            values = torch.frombuffer(data, dtype=dtype, offset=at, count=token_bytes * tokens // layout.itemsize)
            values = values.view(2, layer.heads, tokens, layer.head_size).to(runner.device)
            part.state.append(layer.layer, piece.start, values[:1], values[1:])
            at += token_bytes * tokens
        if piece.first_layer + piece.layer_count == len(layout.layers):
            self._prepared.record_received(number, index, piece.end)

    def end_receiving(self, number: int) -> None:
        """Have the rest of an order computed."""
        self._prepared.end_receiving(number)

    def discard(self, name: str) -> None:
        """Discard what is kept as `name`. Unknown names are ignored."""
        self._prepared.forget(name)
