"""Hand-offs of a running request to another instance."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from opentelemetry.trace import SpanContext

from services.gateway.domain.ticket import Ticket
from shared.contracts.migration import RequestMoved
from shared.errors import ThawError


@dataclass(slots=True)
class OrderedHandoff:
    """A hand-off that a migrator ordered and that has not completed.

    Attributes:
        token: Fencing token of the order.
        prepared: Name of the KV cache that the destination has computed ahead.
        link: Span of the migration.
        source_released: Set when the gateway no longer listens to the source.
        result: The instance that runs the request now, or the reason why the hand-off failed.
    """

    migration_id: str
    token: int
    destination: str
    prepared: str
    link: SpanContext | None = None
    source_released: asyncio.Event = field(default_factory=asyncio.Event)
    result: asyncio.Future[RequestMoved] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    def complete(self, tokens: int, pause_ms: float) -> None:
        if not self.result.done():
            self.result.set_result(RequestMoved(instance_id=self.destination, tokens=tokens, pause_ms=pause_ms))

    def fail(self, error: ThawError) -> None:
        self.source_released.set()
        if not self.result.done():
            self.result.set_exception(error)
            self.result.exception()  # mark as retrieved: the caller may have timed out


@dataclass(slots=True)
class HandoffRecord:
    """One hand-off that has begun.

    Attributes:
        kind: `move` if it was ordered, `failover` if the source was lost.
        tokens: Tokens that the destination continues from; 0: it starts again.
        last_output_at: Time at which the source's last output arrived; None: it sent none.
        pause_ms: From the source's last output to the destination's first; None: not yet known.
    """

    kind: Literal["move", "failover"]
    source: str
    destination: str
    tokens: int
    last_output_at: float | None
    started_at: float
    migration_id: str | None = None
    link: SpanContext | None = None
    pause_ms: float | None = None


class Handoffs:
    """All hand-offs of one request.

    Attributes:
        instance_id: The instance to which the request was last sent; empty: none yet.
        ordered: The hand-off that is in progress on a migrator's order.
        fencing_token: The highest token of the orders accepted so far.
    """

    def __init__(self) -> None:
        self.instance_id = ""
        self.ordered: OrderedHandoff | None = None
        self.fencing_token = 0
        self._records: list[HandoffRecord] = []
        self._losses = 0

    def __iter__(self) -> Iterator[HandoffRecord]:
        return iter(self._records)

    def ordered_to(self, instance_id: str | None) -> OrderedHandoff | None:
        """Return the ordered hand-off if `instance_id` is its destination."""
        return self.ordered if self.ordered and self.ordered.destination == instance_id else None

    def attempt_started(
        self,
        ticket: Ticket,
        ordered: OrderedHandoff | None,
        tokens: int | None,
        last_output_at: float,
        now: float,
    ) -> None:
        """The request is sent to the instance that its ticket names.

        Args:
            ordered: The order that sends it there.
            tokens: Tokens that the instance continues from; None: it starts the response.
            last_output_at: Time at which the last output arrived; 0: none has.
        """
        self._record(ticket, ordered, tokens, last_output_at, now)
        if ordered is not None:
            ordered.source_released.set()

    def _record(
        self,
        ticket: Ticket,
        ordered: OrderedHandoff | None,
        tokens: int | None,
        last_output_at: float,
        now: float,
    ) -> None:
        source, self.instance_id = self.instance_id, ticket.instance_id or ""
        if not source or (ordered is None and tokens is None and ticket.losses == self._losses):
            return
        self._losses = ticket.losses
        if self._records and self._records[-1].pause_ms is None:
            source = self._records.pop().source  # its destination sent nothing
        record = HandoffRecord(
            "move" if ordered else "failover",
            source,
            self.instance_id,
            tokens or 0,
            last_output_at or None,
            now,
        )
        if ordered is not None:
            record.migration_id, record.link = ordered.migration_id, ordered.link
        self._records.append(record)

    def output_arrived(self, instance_id: str | None, now: float) -> None:
        """The instance sent output: complete the hand-off to it, if there is one."""
        record = self._records[-1] if self._records else None
        if record is None or record.pause_ms is not None or record.destination != instance_id:
            return
        since = record.last_output_at
        record.pause_ms = (now - since) * 1e3 if since is not None else 0.0
        if (ordered := self.ordered_to(record.destination)) is not None:
            ordered.complete(record.tokens, record.pause_ms)
            self.ordered = None

    def abandon(self, error: ThawError) -> None:
        """Fail the ordered hand-off, if there is one; the request itself continues."""
        ordered, self.ordered = self.ordered, None
        if ordered is not None:
            ordered.fail(error)

    def of_migration(self, migration_id: str) -> HandoffRecord | None:
        """Return the latest hand-off of a migration."""
        return next((h for h in reversed(self._records) if h.migration_id == migration_id), None)
