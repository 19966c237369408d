"""A request that is being moved to another instance, as its exchange knows of it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from opentelemetry.trace import SpanContext

from shared.contracts.migration import RequestMoved
from shared.errors import ThawError


@dataclass(slots=True)
class Move:
    """`left` is set when the source is heard no longer. `done` is what became of it: where the request is, or why it could not go there."""

    migration_id: str
    token: int
    to: str
    prepared: str
    link: SpanContext | None = None
    left: asyncio.Event = field(default_factory=asyncio.Event)
    done: asyncio.Future[RequestMoved] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    def arrive(self, tokens: int, pause_ms: float) -> None:
        if not self.done.done():
            self.done.set_result(RequestMoved(instance_id=self.to, tokens=tokens, pause_ms=pause_ms))

    def fail(self, error: ThawError) -> None:
        self.left.set()
        if not self.done.done():
            self.done.set_exception(error)
            self.done.exception()  # whoever asked may have given up waiting
