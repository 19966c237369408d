"""Keys and values that a group receives, without a model: sequences, offers and receivers."""

from __future__ import annotations

from typing import Any

import torch

from services.engine.domain.kv_pieces import Piece
from services.engine.generation.kv_bytes import layout_of, read_piece
from services.engine.generation.kv_cache import SequenceKV
from services.engine.generation.kv_transfers import KvTransfers
from services.engine.generation.prepared_prefixes import PreparedPrefixes, PrepareOrder
from shared.contracts.kv_transfer import KvLayer, KvLayout, KvOffer, KvPart

LAYERS, HEADS, SIZE = 4, 2, 3
CPU = torch.device("cpu")


def sequence(tokens: int, layers: range = range(LAYERS)) -> SequenceKV:
    """Return a sequence whose values are those of its layer and token."""
    state = SequenceKV()
    for layer in layers:
        values = torch.arange(tokens, dtype=torch.float32)[None, None, :, None] + 1000.0 * layer
        values = values.expand(1, HEADS, tokens, SIZE)
        state.append(layer, 0, values, -values)
    return state


class FakeRunner:
    """A runner that computes nothing."""

    rewinds = True
    device = CPU

    def new_state(self) -> SequenceKV:
        return SequenceKV()

    def warm_up(self) -> SequenceKV:
        return sequence(2)


def offer(*counts: int) -> KvOffer:
    """Return the offer of a group whose stages have so many layers."""
    parts, first = list[KvPart](), 0
    for count in counts:
        layers = tuple(KvLayer(layer=i, heads=HEADS, head_size=SIZE) for i in range(first, first + count))
        parts.append(KvPart(host="h", port=1, layout=KvLayout(dtype="float32", itemsize=4, layers=layers)))
        first += count
    one = parts[0]
    return KvOffer(host="h", port=1, layout=one.layout, ticket="0" * 32, secret="s" * 43, later=tuple(parts[1:]))


class Receiving:
    """A prepared sequence that is received.

    Attributes:
        number: Of the order that was accepted.
    """

    def __init__(self, tokens: int, runner: FakeRunner | None = None, free_blocks: int = 100) -> None:
        runner = runner or FakeRunner()
        self.prepared = PreparedPrefixes(runner)  # type: ignore[arg-type]  # it computes nothing
        self.transfers = KvTransfers(runner, self.prepared, lambda: (), lambda: free_blocks)  # type: ignore[arg-type]
        accepted: list[int] = []
        self.prepared.order(
            PrepareOrder(
                "p",
                (tuple(range(tokens + 1)),),
                None,
                "",
                60.0,
                60.0,
                lambda outcome: None,
                on_accepted=lambda number, computed: accepted.append(number),
            ),
            100,
        )
        (self.number,) = accepted
        self.source = sequence(tokens)

    def store(self, piece: Piece) -> None:
        data: Any = bytearray(read_piece(self.source, piece, layout_of(self.source)))
        self.transfers.store(self.number, 0, piece, data)

    @property
    def computed(self) -> int:
        part = self.prepared.find_receiving(self.number, 0)
        assert part is not None
        return part.computed
