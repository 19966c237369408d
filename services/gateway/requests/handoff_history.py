"""The times that a request went on, or began anew, at another instance."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from opentelemetry.trace import SpanContext

from services.gateway.domain.ticket import Ticket
from services.gateway.requests.handoff import Move


@dataclass(slots=True)
class Handover:
    """`since`: when the last was heard of the instance before; None: nothing. `pause_ms`: until the first of the next; None: it has not come."""

    kind: Literal["move", "failover"]
    source: str
    to: str
    tokens: int
    since: float | None
    at: float
    migration_id: str | None = None
    link: SpanContext | None = None
    pause_ms: float | None = None


class Handovers:
    """`instance_id`: where the request was sent last."""

    def __init__(self) -> None:
        self.instance_id = ""
        self._made: list[Handover] = []
        self._losses = 0

    def __iter__(self) -> Iterator[Handover]:
        return iter(self._made)

    def sent(self, ticket: Ticket, move: Move | None, tokens: int | None, since: float, now: float) -> None:
        """The request goes to where its ticket says. `tokens`: there are, which it goes on from; None: it begins. `since`: when the last of
        them came; 0: never."""
        source, self.instance_id = self.instance_id, ticket.instance_id or ""
        if not source or (move is None and tokens is None and ticket.losses == self._losses):
            return
        self._losses = ticket.losses
        if self._made and self._made[-1].pause_ms is None:
            source = self._made.pop().source  # it did not come about
        made = Handover("move" if move else "failover", source, self.instance_id, tokens or 0, since or None, now)
        if move is not None:
            made.migration_id, made.link = move.migration_id, move.link
        self._made.append(made)

    def arrived(self, instance_id: str | None, now: float) -> Handover | None:
        """Something has come from where the request was sent; the handover that this ends, if one does."""
        last = self._made[-1] if self._made else None
        if last is None or last.pause_ms is not None or last.to != instance_id:
            return None
        last.pause_ms = (now - last.since) * 1e3 if last.since is not None else 0.0
        return last

    def of(self, migration_id: str) -> Handover | None:
        """The latest that this migration brought about."""
        return next((h for h in reversed(self._made) if h.migration_id == migration_id), None)
