"""The ranges that a destination requests from the parts of an offer, and checks of the pieces."""

from __future__ import annotations

import hmac
import zlib
from dataclasses import dataclass

from services.engine.domain.frames import ProtocolError
from services.engine.domain.kv_pieces import Piece
from services.engine.kv_transfer.connection import KvFrame
from services.engine.kv_transfer.source import layout_difference
from shared.contracts.kv_transfer import KvLayout, KvOffer, KvPart, KvPiece


class NotTransferred(Exception):
    """The source sent something that must not be used, or nothing."""


@dataclass(frozen=True)
class Selection:
    """The layers that this engine wants of one part of an offer.

    Attributes:
        layout: This engine's, with these layers only.
        first_layer: Position of the first one in the part's layout.
    """

    part: KvPart
    layout: KvLayout
    first_layer: int

    @property
    def layer_count(self) -> int | None:
        """Return the number of layers; None: all that the part has."""
        count = len(self.layout.layers)
        return None if count == len(self.part.layout.layers) else count


def match_parts(own: KvLayout, offer: KvOffer, *, is_stage: bool = False) -> tuple[Selection, ...]:
    """Return the layers of this engine in each part of an offer that has some of them.

    Args:
        own: This engine's layout.
        offer: Of the source.
        is_stage: The engine has a part of the model's layers only.

    Raises:
        NotTransferred: A part stores keys and values otherwise, the parts do not have this engine's
            layers in their order, or one cannot send a part of its layers.
    """
    for part in offer.parts:
        if difference := layout_difference(own.model_copy(update={"layers": part.layout.layers}), part.layout):
            raise NotTransferred(difference)
    offered = tuple(layer for part in offer.parts for layer in part.layout.layers)
    at = offered.index(own.layers[0]) if own.layers[0] in offered else len(offered)
    end = at + len(own.layers)
    if offered[at:end] != own.layers or (offered != own.layers and not is_stage):
        raise NotTransferred("the engines store keys and values differently (layers)")
    found: list[Selection] = []
    first = 0
    for part in offer.parts:
        begin, until = max(first, at), min(first + len(part.layout.layers), end)
        if begin < until:
            selected = Selection(part, own.select(begin - at, until - begin), begin - first)
            if selected.layer_count is not None and not part.selects_layers:
                raise NotTransferred("the source has a version that sends no selected layers")
            found.append(selected)
        first += len(part.layout.layers)
    return tuple(found)


@dataclass
class Expected:
    """The place of the next piece.

    Attributes:
        start: Its first token.
        until: End of the range of tokens.
        layer: Its first layer.
        block_end: End of a block of tokens of which only some layers have arrived; None: there is
            none.
    """

    layout: KvLayout
    choice: int
    start: int
    until: int
    layer: int = 0
    block_end: int | None = None

    def take(self, frame: KvFrame) -> Piece:
        """Return the piece of a frame.

        Raises:
            NotTransferred: It does not follow the pieces before.
            ProtocolError: The frame is no piece.
        """
        m = frame.message
        if not isinstance(m, KvPiece):
            raise ProtocolError(f"The source sent {m.kind!r}")
        follows = (m.choice, m.start, m.first_layer) == (self.choice, self.start, self.layer)
        is_whole = m.end == self.block_end if self.block_end is not None else self.start < m.end <= self.until
        piece = Piece(m.start, m.end, m.first_layer, m.layer_count)
        if not follows or not is_whole or m.first_layer + m.layer_count > len(self.layout.layers):
            raise NotTransferred("a piece is not of the range that was asked for")
        if len(frame.data) != piece.size_bytes(self.layout):
            raise NotTransferred(f"a piece has {len(frame.data)} bytes, not {piece.size_bytes(self.layout)}")
        self.layer = (m.first_layer + m.layer_count) % len(self.layout.layers)
        if self.layer:
            self.block_end = m.end
        else:
            self.start, self.block_end = m.end, None
        return piece


def verify_content(frame: KvFrame, prefix_hash: str) -> None:
    """Raise `NotTransferred` if a piece is of other tokens or another model, or was damaged."""
    assert isinstance(frame.message, KvPiece)
    if not hmac.compare_digest(frame.message.prefix_hash, prefix_hash):
        raise NotTransferred("a piece is of other tokens, or of another model")
    if zlib.crc32(frame.data) != frame.message.checksum:
        raise NotTransferred("a piece was damaged on its way")
