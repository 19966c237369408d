"""Handlers of messages, registered and removed at run time."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from faststream.nats import NatsMessage
from nats.aio.client import Client
from nats.aio.subscription import Subscription
from nats.errors import Error as NatsError

log = logging.getLogger(__name__)
_DRAIN_S = 2.0
_HANDOVER_TURNS = 20
"""Turns of the event loop between a message's removal from FastStream's queue and the start of its
handler.
"""


class Responder(Protocol):
    """A registered handler. It receives messages between `start` and `stop`."""

    async def start(self) -> None: ...
    async def stop(self) -> None: ...


class HandlerReference:
    """The reference to a handler, which is dropped when its responder stops.

    FastStream puts the subscriber, and with it the handler, into the context of each message. The
    event loop keeps that context with every timer that the handler has set, until the timer would
    have expired: cancelled timers too, such as those of deadlines. Without this reference a stopped
    engine would stay in memory, and its weights mapped, for as long as the deadline of its last
    request.
    """

    def __init__(self, handler: Callable[[NatsMessage], Awaitable[Any]]) -> None:
        self._handler: Callable[[NatsMessage], Awaitable[Any]] | None = handler

    async def handle(self, message: NatsMessage) -> Any:
        """Call the handler. A stopped responder gets no messages."""
        return await self._handler(message) if self._handler is not None else None

    def drop(self) -> None:
        self._handler = None


class DrainingResponder:
    """A FastStream subscriber whose stop leaves no request unanswered.

    It unsubscribes first, then handles what has arrived. FastStream's own `stop` drops requests
    that arrive while it waits for handlers. A stopped responder cannot be started again.
    """

    def __init__(
        self, client: Callable[[], Client], flush: Callable[[], Awaitable[None]], subscriber: Any, handler: HandlerReference
    ) -> None:
        self._client, self._flush, self._subscriber, self._handler = client, flush, subscriber, handler
        self._drained: asyncio.Task[None] | None = None

    async def start(self) -> None:
        await self._subscriber.start()

    async def stop(self) -> None:
        if self._subscriber.subscription is not None and self._client().is_connected:
            # If a handler takes longer, the task continues and ends with the handler.
            self._drained = asyncio.create_task(self._drain(self._subscriber.subscription), name="drain a subscription")
            self._subscriber.subscription = None
            await asyncio.wait((self._drained,), timeout=_DRAIN_S)
        await self._subscriber.stop()
        self._handler.drop()

    async def _drain(self, subscription: Subscription) -> None:
        try:
            # The flush in nats-py's own drain may overtake what it has sent (see `Mesh.flush`).
            await self._client()._send_unsubscribe(subscription._id)
            await self._flush()
            await subscription.drain()  # type: ignore[no-untyped-call]  # nats-py leaves it without types
        except (NatsError, OSError, TimeoutError) as e:
            log.info("a subscription was not drained", extra={"subject": subscription.subject, "error": repr(e)})
        queued = getattr(self._subscriber, "send_stream", None)  # of a concurrent one
        for _ in range(_HANDOVER_TURNS + (queued.statistics().current_buffer_used if queued is not None else 0)):
            await asyncio.sleep(0)
