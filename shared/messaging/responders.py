"""Handlers of messages, registered and removed at run time."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

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


class DrainingResponder:
    """A FastStream subscriber whose stop leaves no request unanswered.

    It unsubscribes first, then handles what has arrived. FastStream's own `stop` drops requests
    that arrive while it waits for handlers.
    """

    def __init__(self, client: Callable[[], Client], flush: Callable[[], Awaitable[None]], subscriber: Any) -> None:
        self._client, self._flush, self._subscriber = client, flush, subscriber
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
