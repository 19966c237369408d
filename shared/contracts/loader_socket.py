"""Define the loader's local protocol for readers without NATS.

Both sides send JSON lines over the Unix stream socket `<node state>/loader/loader.sock`.

    reader → loader    one `SocketAttach`, or one `SocketAudit`
    loader → reader    `SocketAttached` when the segment's header and index are there,
                       `SocketWatermark` as bytes arrive,
                       `SocketComplete` when all are; or `SocketError`, after which the loader
                       closes the connection; `SocketAudited` answers `SocketAudit`

An engine that has attached weights over NATS follows their load in the same way, to compute while
the rest arrives (Torpor, section 4.3):

    engine → loader    one `SocketFollow`
    loader → engine    `SocketArrived` as bytes arrive in host memory; or, for a device with memory
                       of its own, `SocketPages` and then `SocketUnits` as units arrive there, or
                       `SocketDescriptors` if the layout is a GPU's; `SocketComplete` when all are;
                       or `SocketError`

An engine whose handle is a `GpuUnitsHandle` maps the units:

    engine → loader    one `SocketMap`
    loader → engine    `SocketDescriptors`, each with the descriptors of its units (SCM_RIGHTS);
                       `SocketComplete` after the last; or `SocketError`

Its hold is the one over NATS, and does not end with the connection.

The reader holds the weights as long as the connection is open. It unmaps them, and then releases
them by closing the connection. A loader that stops closes the connection; complete weights stay
valid until the reader ends.

An engine on a device with memory of its own borrows pages for its KV cache:

    engine → loader    one `SocketBorrow`, then `SocketDemand` and `SocketReturn` as it needs more
                       or less
    loader → engine    `SocketBorrowing`; `SocketLent` in answer to each demand, and again when more
                       pages can be lent or the engine's turn begins; `SocketShrink` when others
                       need pages

Engines that lack pages for any sequence ask for a turn. One of them has it at a time, in the order
in which they asked: its `turn_pages` are as safe as its floor, and others return pages for them.

On a GPU the engine allocates as much memory itself, and returns pages when it has released that
memory. Pages that it has not returned are taken back when its process has exited (ADR 0107).

Elsewhere the engine maps lent pages without access (a mark in /proc/PID/maps, which no kill can
leave behind) and uses as much memory of its own. Pages are taken back when the engine has unmapped
and returned them, or when the connection is closed and no process maps them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Discriminator, Field, Tag, TypeAdapter, model_validator

from shared.contracts.audit import DeviceAudit
from shared.contracts.base import ErrorBody, Message
from shared.contracts.segment import ByteRange, Extent, PagesLayout, UnitPages
from shared.contracts.stages import RankOf

MAX_LINE_BYTES = 4 * 1024 * 1024


def loader_socket(node_state: Path) -> Path:
    """Return the socket of the loader of the node with this state directory."""
    return node_state / "loader" / "loader.sock"


class SocketAttach(Message):
    """Attach weights by `weights_id` or by `source`; exactly one of them is set.

    Attributes:
        weights_id: A revision that the loader holds or loads already.
        source: A model; the loader starts the load if none is running.
        rank: Only what this rank of a tensor-parallel group needs; with `source` only.
    """

    kind: Literal["attach"] = "attach"
    weights_id: str | None = None
    source: str | None = Field(default=None, description="As in `ModelSpec.source`.")
    background: bool = Field(default=False, description="No request waits for it: other loads go first.")
    rank: RankOf | None = None

    @model_validator(mode="after")
    def _one_of_both(self) -> Self:
        if (self.weights_id is None) == (self.source is None):
            raise ValueError("give either weights_id or source")
        if self.rank is not None and self.source is None:
            raise ValueError("give rank with source: a weights_id names its part already")
        return self


class SocketAudit(Message):
    """Audit the node's device memory (`AuditMemory`)."""

    kind: Literal["audit"] = "audit"


class SocketFollow(Message):
    """Report the arrival of weights that `instance_id` has attached."""

    kind: Literal["follow"] = "follow"
    instance_id: str
    weights_id: str


class SocketMap(Message):
    """Send descriptors of the units on a GPU of weights that `instance_id` has attached there.

    The units count as mapped by the connected process until it has exited.
    """

    kind: Literal["map"] = "map"
    instance_id: str
    weights_id: str


class SocketAttached(Message):
    """The segment: the consecutive `extents` of the file at `path`.

    shared/contracts/segment.py defines its layout.
    """

    kind: Literal["attached"] = "attached"
    weights_id: str
    path: str
    extents: tuple[Extent, ...] = ()
    directory: str = Field(description="Where the model's small files lie.")
    total_bytes: int
    loaded_bytes: int = Field(description="The watermark: every byte of the segment below it is there.")


class SocketWatermark(Message):
    kind: Literal["watermark"] = "watermark"
    loaded_bytes: int


class SocketArrived(Message):
    """These bytes of the segment are in host memory."""

    kind: Literal["arrived"] = "arrived"
    ranges: tuple[ByteRange, ...]


class SocketPages(Message):
    """The segment's units will be on the device; none is reported before this message."""

    kind: Literal["pages"] = "pages"
    layout: PagesLayout


class SocketUnits(Message):
    """These units are on the device, and may be mapped."""

    kind: Literal["units"] = "units"
    units: tuple[UnitPages, ...]


class SocketDescriptors(Message):
    """Units of which the line carries a descriptor each, in this order."""

    kind: Literal["descriptors"] = "descriptors"
    units: tuple[int, ...]


class SocketComplete(Message):
    kind: Literal["complete"] = "complete"
    loaded_bytes: int


class SocketAudited(Message):
    kind: Literal["audited"] = "audited"
    devices: tuple[DeviceAudit, ...] = ()


class SocketError(Message):
    kind: Literal["error"] = "error"
    error: ErrorBody


class SocketBorrow(Message):
    """Borrow pages of `device` for the KV cache of an instance."""

    kind: Literal["borrow"] = "borrow"
    device: str
    instance_id: str
    floor_pages: int = Field(ge=0, description="Booked pages: the loader does not ask for them back.")
    ceiling_pages: int | None = Field(default=None, ge=0, description="The most pages that the cache may have; None: unknown.")
    model: str = Field(default="", description="Name of the instance's model.")


class SocketDemand(Message):
    """The engine wants to have `pages` in all from this connection."""

    kind: Literal["demand"] = "demand"
    number: int = Field(ge=1, description="Increases with each demand of a connection.")
    pages: int = Field(ge=0)
    turn: int = Field(default=0, ge=0, description="Number of the turn that the engine waits for or has; 0: none.")
    turn_pages: int = Field(
        default=0, ge=0, description="What the oldest sequence needs: guaranteed while it is the engine's turn."
    )


class SocketReturn(Message):
    """The engine has freed and unmapped these pages, or does not take them."""

    kind: Literal["return"] = "return"
    pages: tuple[int, ...]


class SocketBorrowing(Message):
    """The engine may send demands.

    `file`: the device's pages under /dev/shm, of `total_pages`; empty on a GPU.
    """

    kind: Literal["borrowing"] = "borrowing"
    file: str
    total_pages: int


class SocketLent(Message):
    """Pages that are lent in addition; none if there are none now."""

    kind: Literal["lent"] = "lent"
    number: int = Field(description="The latest demand that the loader has seen.")
    pages: tuple[int, ...] = ()
    turn: int | None = Field(default=None, description="The turn that the engine has; 0: none. None: the loader knows no turns.")


class SocketShrink(Message):
    """Others need pages: the engine returns all but `pages`, preempting sequences if it must."""

    kind: Literal["shrink"] = "shrink"
    pages: int


BorrowerLine = Annotated[SocketDemand | SocketReturn, Field(discriminator="kind")]
BORROWER_LINE: TypeAdapter[BorrowerLine] = TypeAdapter(BorrowerLine)
LenderLine = Annotated[SocketBorrowing | SocketLent | SocketShrink | SocketError, Field(discriminator="kind")]
LENDER_LINE: TypeAdapter[LenderLine] = TypeAdapter(LenderLine)


def _kind_of(asked: Any) -> str:
    """Return the kind of a request; it is optional in `SocketAttach`."""
    return str(asked.get("kind", "attach") if isinstance(asked, dict) else asked.kind)


SocketAsk = Annotated[
    Annotated[SocketAttach, Tag("attach")]
    | Annotated[SocketAudit, Tag("audit")]
    | Annotated[SocketFollow, Tag("follow")]
    | Annotated[SocketMap, Tag("map")]
    | Annotated[SocketBorrow, Tag("borrow")],
    Discriminator(_kind_of),
]
SOCKET_ASK: TypeAdapter[SocketAsk] = TypeAdapter(SocketAsk)

SocketReply = Annotated[
    SocketAttached
    | SocketWatermark
    | SocketArrived
    | SocketPages
    | SocketUnits
    | SocketDescriptors
    | SocketComplete
    | SocketAudited
    | SocketError,
    Field(discriminator="kind"),
]
SOCKET_REPLY: TypeAdapter[SocketReply] = TypeAdapter(SocketReply)
