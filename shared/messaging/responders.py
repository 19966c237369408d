"""Handlers of messages, which the NATS client calls, registered and removed at run time.

A responder that is stopped unsubscribes, handles what has arrived, and gives the running handlers
two seconds. Then it cancels those that run concurrently: their requesters get no reply, as from a
process that has ended. A serial handler that takes longer continues to its end. See docs/adr/0109.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from typing import Protocol

from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.errors import Error as NatsError

from shared.contracts.base import Failure
from shared.errors import ThawError

log = logging.getLogger(__name__)
Handle = Callable[[Msg], Awaitable[None]]
_GRACE_S = 2.0
_CANCELLED_WITHIN_S = 1.0
CONCURRENT_HANDLERS = 256


class Responder(Protocol):
    """A registered handler. It receives messages between `start` and `stop`."""

    async def start(self) -> None: ...
    async def stop(self) -> None: ...


class Connection(Protocol):
    """The part of a process's connection that a responder needs: see `Mesh`."""

    @property
    def nc(self) -> Client: ...
    async def flush(self) -> None: ...
    def add_responder(self, responder: SubscribedResponder) -> None: ...
    def remove_responder(self, responder: SubscribedResponder) -> None: ...


class SubscribedResponder:
    """Handles the messages of one subscription: serially, in the order of their arrival.

    A stopped responder cannot be started again. It keeps no reference to its handler, whose owner
    may be an engine with its weights mapped.
    """

    def __init__(self, connection: Connection, subject: str, queue: str, handle: Handle) -> None:
        self._connection, self._subject, self._queue = connection, subject, queue
        self._handle: Handle | None = handle
        self._subscription: Subscription | None = None
        self._stopping: asyncio.Task[None] | None = None
        self._was_stopped = False

    async def start(self) -> None:
        if self._subscription is None and not self._is_stopped():
            subscribe = self._connection.nc.subscribe
            subscription = await subscribe(self._subject, queue=self._queue, cb=self._on_message)
            if self._is_stopped():
                await subscription.unsubscribe()
                return
            self._subscription = subscription
            self._connection.add_responder(self)

    async def stop(self) -> None:
        self._was_stopped = True
        if self._stopping is None:
            if self._subscription is None:
                self._handle = None
                return
            # A task: it continues if the caller is cancelled, or a serial handler takes longer.
            self._stopping = asyncio.create_task(self._stop(self._subscription), name="stop a responder")
        await self._wait_for(self._stopping)

    async def abandon(self) -> None:
        """Cancel what still runs. The connection is about to close."""
        if self._stopping is not None:
            self._stopping.cancel()
            await asyncio.wait((self._stopping,), timeout=_CANCELLED_WITHIN_S)

    def _is_stopped(self) -> bool:
        return self._was_stopped

    async def _wait_for(self, stopping: asyncio.Task[None]) -> None:
        await asyncio.wait((stopping,), timeout=_GRACE_S)

    async def _on_message(self, message: Msg) -> None:
        await self._run(message)

    async def _run(self, message: Msg) -> None:
        if self._handle is None:
            return
        try:
            await self._handle(message)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            # The handler awaited something that was cancelled. The error would end nats-py's loop.
            log.warning("a handler was cancelled", extra={"subject": self._subject})
            await self._fail(message)
        except (NatsError, OSError) as e:
            log.info("a message was not answered", extra={"subject": self._subject, "error": repr(e)})

    async def _stop(self, subscription: Subscription) -> None:
        try:
            await self._drain(subscription)
        finally:
            with contextlib.suppress(NatsError, OSError):
                await subscription.unsubscribe()
            self._subscription = self._handle = None
            self._connection.remove_responder(self)

    async def _drain(self, subscription: Subscription) -> None:
        """Unsubscribe, and wait until what has arrived is handled."""
        client = self._connection.nc
        if client.is_connected:
            try:
                await client._send_unsubscribe(subscription._id)
                await self._connection.flush()
            except (NatsError, OSError, TimeoutError) as e:
                log.info("a subscription was not drained", extra={"subject": self._subject, "error": repr(e)})
        await subscription._pending_queue.join()

    async def _fail(self, message: Msg) -> None:
        if message.reply:
            error = ThawError(f"A task that was cancelled was awaited while answering {self._subject}")
            with contextlib.suppress(NatsError, OSError):
                await self._connection.nc.publish(message.reply, Failure(error=error.body()).model_dump_json().encode())


class ConcurrentResponder(SubscribedResponder):
    """Handles each message in a task of its own, up to `most` at a time."""

    def __init__(self, connection: Connection, subject: str, queue: str, handle: Handle, most: int | None = None) -> None:
        """Create a responder for at most `most` messages at a time (`CONCURRENT_HANDLERS`)."""
        super().__init__(connection, subject, queue, handle)
        self._free = asyncio.Semaphore(most or CONCURRENT_HANDLERS)
        self._running: set[asyncio.Task[None]] = set()
        self._is_late = False

    async def _on_message(self, message: Msg) -> None:
        await self._free.acquire()
        if self._is_late:
            self._free.release()
            return
        task = asyncio.create_task(self._run(message), name=self._subject)
        self._running.add(task)
        task.add_done_callback(self._on_done)

    def _on_done(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        self._free.release()
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a handler failed", exc_info=error, extra={"subject": self._subject})

    async def _wait_for(self, stopping: asyncio.Task[None]) -> None:
        await asyncio.wait((stopping,), timeout=_GRACE_S + _CANCELLED_WITHIN_S)

    async def _drain(self, subscription: Subscription) -> None:
        late = asyncio.get_running_loop().call_later(_GRACE_S, self._cancel_running)
        try:
            await super()._drain(subscription)
            while self._running:
                await asyncio.wait(self._running)
        finally:
            late.cancel()
            self._cancel_running()

    def _cancel_running(self) -> None:
        self._is_late = True
        for task in self._running:
            task.cancel()
