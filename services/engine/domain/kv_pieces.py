"""The pieces in which keys and values are sent, and the hash that binds a piece to its tokens."""

from __future__ import annotations

import hashlib
import json
import sys
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from services.engine.domain.step_planning import BLOCK_TOKENS
from shared.contracts.kv_transfer import KvLayout

PIECE_BYTES = 1 << 20
"""Size of a piece, if a block of one layer is not larger.

A piece is copied between two steps: 1 MiB takes about 0.2 ms.
"""
PULL_BYTES = 32 << 20
"""Most bytes that a destination asks for at once, unless a block of tokens has more."""


@dataclass(frozen=True)
class Piece:
    """Tokens [start, end) in `layer_count` layers of a layout."""

    start: int
    end: int
    first_layer: int
    layer_count: int

    @property
    def layers(self) -> slice:
        return slice(self.first_layer, self.first_layer + self.layer_count)

    def size_bytes(self, layout: KvLayout) -> int:
        return (self.end - self.start) * sum(layout.layer_bytes[self.layers])


def plan_pieces(start: int, end: int, layout: KvLayout, piece_bytes: int = PIECE_BYTES) -> Iterator[Piece]:
    """Divide tokens [start, end) into pieces, block by block and layer by layer.

    1. Small blocks: a piece has all layers of as many whole blocks as fit.
    2. Large blocks: a piece has as many layers of one block as fit, at least one.
    """
    layer_bytes = layout.layer_bytes
    block_bytes = layout.token_bytes * BLOCK_TOKENS
    blocks = max(1, piece_bytes // block_bytes)
    while start < end:
        until = min(end, (start // BLOCK_TOKENS + blocks) * BLOCK_TOKENS)
        if block_bytes <= piece_bytes:  # 1
            yield Piece(start, until, 0, len(layer_bytes))
        else:  # 2
            yield from _by_layers(start, until, layer_bytes, piece_bytes)
        start = until


def _by_layers(start: int, end: int, layer_bytes: Sequence[int], piece_bytes: int) -> Iterator[Piece]:
    first = size = 0
    for layer, token_bytes in enumerate(layer_bytes):
        more = token_bytes * (end - start)
        if layer > first and size + more > piece_bytes:
            yield Piece(start, end, first, layer - first)
            first, size = layer, 0
        size += more
    yield Piece(start, end, first, len(layer_bytes) - first)


def pull_tokens(layout: KvLayout) -> int:
    """Return the number of tokens that a destination asks for at once: whole blocks."""
    return max(1, PULL_BYTES // (layout.token_bytes * BLOCK_TOKENS)) * BLOCK_TOKENS


@dataclass(frozen=True)
class KvIdentity:
    """The properties that keys and values depend on, apart from their tokens.

    Attributes:
        revision: Of the model's weights.
        variant: Revision of the LoRA adapter; empty: none.
        cache_salt: Of the API key.
    """

    revision: str
    variant: str
    cache_salt: str
    layout: KvLayout

    def digest(self) -> bytes:
        """Return a hash of all fields."""
        fields = [self.revision, self.variant, self.cache_salt, self.layout.model_dump(mode="json")]
        return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).digest()


class PrefixHash:
    """Hashes of the prefixes of one sequence. Ask for them in the order of their length."""

    def __init__(self, identity: KvIdentity, tokens: Sequence[int]) -> None:
        self._hash = hashlib.sha256(identity.digest())
        self._tokens, self._length = tokens, 0

    def up_to(self, end: int) -> str:
        """Return the hash of the first `end` tokens.

        Raises:
            ValueError: A longer prefix was asked for before, or the sequence is shorter.
        """
        if not self._length <= end <= len(self._tokens):
            raise ValueError(f"a prefix of {end} tokens after one of {self._length}, of {len(self._tokens)}")
        more = array("I", self._tokens[self._length : end])
        if sys.byteorder == "big":
            more.byteswap()
        self._hash.update(more.tobytes())
        self._length = end
        return self._hash.hexdigest()
