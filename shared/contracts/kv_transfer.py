"""Keys and values of a running request, sent from its engine to the engine that will resume it.

The migrator gets a `KvOffer` with the request's tokens (`TokensRead`), and passes it on with
`PrepareResume`. The destination then connects to the source over TCP: bulk data never travels on
NATS. On the connection the destination asks, and the source answers:

    `KvPull`     tokens [start, end) of one choice in some layers, please.
    `KvPiece`    keys and values of some of these tokens in some layers; the bytes follow.
    `KvPulled`   there are no more pieces: all are sent, or the source has no more.

`services/engine/domain/kv_pieces.py` divides a range into pieces, and computes the hash that binds
a piece to its tokens. ADR 0084 has the reasons.

Each stage of a group has the keys and values of its layers. The destination connects to all of them
(ADR 0093). A group as destination does this in each of its stages, which asks for its own layers
only (ADR 0094).
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from shared.contracts.base import Frozen, Message

KV_LAYOUT_VERSION = 1
"""Layout of a piece's bytes: for each layer [2, heads, tokens, head size], keys before values."""


class KvLayer(Frozen):
    """Keys and values of one layer."""

    layer: int = Field(ge=0)
    heads: int = Field(gt=0)
    head_size: int = Field(gt=0)


class KvLayout(Frozen):
    """How an engine stores keys and values. Only engines with equal layouts exchange them.

    Attributes:
        dtype: Name of the element type, as `float32`.
    """

    version: int = KV_LAYOUT_VERSION
    dtype: str
    itemsize: int = Field(gt=0)
    byte_order: Literal["little", "big"] = "little"
    layers: tuple[KvLayer, ...] = Field(min_length=1)

    def select(self, first: int, count: int) -> KvLayout:
        """Return the layout of some of the layers."""
        return self.model_copy(update={"layers": self.layers[first : first + count]})

    @property
    def layer_bytes(self) -> tuple[int, ...]:
        """Return the bytes of one token in each layer."""
        return tuple(2 * x.heads * x.head_size * self.itemsize for x in self.layers)

    @property
    def token_bytes(self) -> int:
        """Return the bytes of one token in all layers."""
        return sum(self.layer_bytes)


TICKET = r"^[0-9a-f]{32}$"


class KvPart(Frozen):
    """An engine process, and the layers whose keys and values it sends."""

    host: str
    port: int = Field(gt=0, lt=65536)
    layout: KvLayout
    selects_layers: bool = Field(default=False, description="It understands `KvPull.first_layer` and `layer_count`.")


class KvOffer(KvPart):
    """The permission to read the keys and values of one request, and where.

    Attributes:
        ticket: Names the permission on a connection.
        secret: Both sides of a connection prove that they know it.
        cache_salt: Of the API key: the destination gives the keys and values to no other key's
            request.
        later: The later stages of a group, in their order; `layout` has the first one's layers
            only. A destination of the previous version ignores them, finds other layers than its
            own, and recomputes.
    """

    ticket: str = Field(pattern=TICKET)
    secret: str = Field(min_length=32, repr=False)
    cache_salt: str = ""
    later: tuple[KvPart, ...] = ()

    @property
    def parts(self) -> tuple[KvPart, ...]:
        """Return all processes that send a part, in the order of their layers."""
        return self, *self.later

    @property
    def token_bytes(self) -> int:
        """Return the bytes of one token in all layers of all parts."""
        return sum(part.layout.token_bytes for part in self.parts)


class KvPull(Message):
    """Ask for tokens [start, end) of a choice.

    Attributes:
        first_layer: Position of the first wanted layer in the layout of the part.
        layer_count: Wanted layers; None: all from `first_layer` on. The pieces are those of a
            layout that has these layers only.
    """

    kind: Literal["pull"] = "pull"
    choice: int = Field(ge=0)
    start: int = Field(ge=0)
    end: int = Field(gt=0)
    first_layer: int = Field(default=0, ge=0)
    layer_count: int | None = Field(default=None, gt=0)


class KvPiece(Message):
    """Keys and values follow: of tokens [start, end), for `layer_count` of the wanted layers.

    Attributes:
        prefix_hash: Of the model, its layout, the key's salt and the tokens up to `end`.
        checksum: CRC-32 of the bytes.
    """

    kind: Literal["piece"] = "piece"
    choice: int = Field(ge=0)
    start: int = Field(ge=0)
    end: int = Field(gt=0)
    first_layer: int = Field(ge=0, description="Position among the wanted layers.")
    layer_count: int = Field(gt=0)
    prefix_hash: str
    checksum: int = Field(ge=0)


class KvPulled(Message):
    """The answer to a `KvPull` is complete.

    Attributes:
        end: The pieces reach up to this token.
        reason: Why they do not reach the end that was asked for; empty: they do.
    """

    kind: Literal["pulled"] = "pulled"
    choice: int = Field(ge=0)
    end: int = Field(ge=0)
    reason: str = ""


KvMessage = Annotated[KvPull | KvPiece | KvPulled, Field(discriminator="kind")]
KV_MESSAGE: TypeAdapter[KvMessage] = TypeAdapter(KvMessage)
