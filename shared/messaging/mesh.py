"""One process's connection to the mesh: typed requests, typed replies, events.

FastStream connects the process and ends the connection. The NATS client calls the handlers
(`shared.messaging.responders`, docs/adr/0109). The token path (gateway ↔ engine) uses the client in
`Mesh.nc`: its protocol (shared/contracts/inference.py) is not request/reply.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TypeVar
from urllib.parse import urlsplit

from faststream.nats import NatsBroker, NatsSecurity
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import ConnectionClosedError, ConnectionReconnectingError, NoRespondersError, OutboundBufferLimitError
from nats.errors import Error as NatsError
from nats.errors import TimeoutError as NatsTimeoutError
from pydantic import TypeAdapter, ValidationError

from shared.contracts.base import Message, Request
from shared.contracts.subjects import token
from shared.errors import DeadlineExceeded, PayloadTooLarge, Unreachable
from shared.messaging.progress import reports, request_with_reports
from shared.messaging.replies import answer, decode_reply, encode_reply, faults_of
from shared.messaging.responders import ConcurrentResponder, Handle, Responder, SubscribedResponder
from shared.nats_urls import inbox_prefix, requires_tls
from shared.settings import CommonSettings
from shared.tasks import end, run_within
from shared.telemetry.logs import LogRateLimit
from shared.telemetry.tracing import carried, carry

log = logging.getLogger(__name__)
M = TypeVar("M")
R = TypeVar("R", bound=Message)
E = TypeVar("E", bound=Message)
HEADROOM_BYTES = 16 * 1024
"""Kept free below `max_payload`: headers count too, and one byte over it closes the connection for
good.
"""
_PING_INTERVAL_S, _OUTSTANDING_PINGS = 5, 2
HALF_OPEN_WITHIN_S = _PING_INTERVAL_S * (_OUTSTANDING_PINGS + 1)
"""Seconds in which a client notices a half-open connection by its own pings."""
_YIELD_AFTER_BYTES = 16 << 10
"""Half of nats-py's read: a shorter one has emptied the stream."""


class Mesh:
    """Owns the process's NATS connection.

    `lost` is set when it has closed for good: the process should then end.
    """

    def __init__(self, settings: CommonSettings, name: str) -> None:
        self.name = name
        self.replicas = settings.nats_replicas
        self.lost = asyncio.Event()
        self.reconnections = 0
        self._reconnect_listeners: list[Callable[[], None]] = []
        self._stopping = False
        self._probe: asyncio.Task[bool] | None = None
        self._away = LogRateLimit()
        urls = [url.strip() for url in settings.nats_url.get_secret_value().split(",")]
        self._servers = ",".join((urlsplit(url).netloc or url).rpartition("@")[2] for url in urls)
        self._broker = NatsBroker(
            urls,
            name=name,
            inbox_prefix=inbox_prefix(urls[0]),
            security=NatsSecurity(tls_handshake_first=requires_tls(urls)),
            apply_types=False,
            logger=None,
            allow_reconnect=True,
            max_reconnect_attempts=-1,
            reconnect_time_wait=0.1,  # type: ignore[arg-type]  # seconds; the stub says int, the client takes fractions
            ping_interval=_PING_INTERVAL_S,
            max_outstanding_pings=_OUTSTANDING_PINGS,
            error_cb=self._on_error,
            disconnected_cb=self._on_disconnected,
            reconnected_cb=self._on_reconnected,
            closed_cb=self._on_closed,
        )
        self._started = False
        self._declared: list[SubscribedResponder] = []
        """Responders that `start` will start."""
        self._responders: set[SubscribedResponder] = set()
        """Responders that have a subscription."""

    async def start(self) -> None:
        """Connect, without a time limit, and start every handler registered so far."""
        await self._broker.start()
        survive_cancelled_flushes(self.nc)
        yield_between_reads(self.nc)
        for responder in self._declared:
            await responder.start()
        self._declared.clear()
        self._away.reset()
        self._started = True

    async def start_unless(self, stop: asyncio.Event) -> bool:
        """Start, but give up when `stop` is set.

        Returns:
            True if the mesh has started.
        """
        starting = asyncio.create_task(self.start(), name="connect")
        stopped = asyncio.create_task(stop.wait(), name="stop")
        try:
            await asyncio.wait((starting, stopped), return_when=asyncio.FIRST_COMPLETED)
            if starting.done():
                starting.result()
            return starting.done()
        finally:
            await end(starting, stopped)

    async def stop(self) -> None:
        """Close the connection.

        What is still to be sent, and then running handlers, get at most 2 s each.
        """
        self._stopping = True
        if self._probe is not None:
            await end(self._probe)
        if self._started:
            try:
                await self.nc.flush(timeout=2)
            except NatsTimeoutError:
                log.warning("NATS did not confirm the last messages; closing", extra={"servers": self._servers})
        await asyncio.gather(*(responder.stop() for responder in self._responders))
        await asyncio.gather(*(responder.abandon() for responder in self._responders))
        try:
            await self._broker.stop()
        except (ConnectionReconnectingError, NatsTimeoutError):
            # NATS is away, or does not answer: nothing can be drained.
            with suppress(OSError):  # of the lost connection
                await self.nc.close()

    def add_responder(self, responder: SubscribedResponder) -> None:
        """Note that a responder has subscribed. `stop` stops it."""
        self._responders.add(responder)

    def remove_responder(self, responder: SubscribedResponder) -> None:
        """Note that a responder has no subscription any more."""
        self._responders.discard(responder)

    @contextmanager
    def on_reconnect(self, listener: Callable[[], None]) -> Iterator[None]:
        """Call `listener` after each reconnection inside the block."""
        self._reconnect_listeners.append(listener)
        try:
            yield
        finally:
            self._reconnect_listeners.remove(listener)

    @property
    def is_connected(self) -> bool:
        """True while there is a connection to NATS."""
        return self._started and bool(self.nc.is_connected)

    @property
    def nc(self) -> Client:
        """The raw client."""
        return self._broker.connection

    async def flush(self, within: int = 10) -> None:
        """Wait until the server has processed what was sent so far: see `flush`."""
        await flush(self.nc, within)

    async def probe(self, within_s: float) -> bool:
        """Return True if the server answers. A connection on which it does not is opened again.

        The client itself notices a half-open connection within `HALF_OPEN_WITHIN_S`. Calls at the
        same time share one probe, because a new connection loses the answers to all others.

        Args:
            within_s: Seconds in which it has to answer; a pause of this process counts less.
        """
        if self._probe is None or self._probe.done():
            self._probe = asyncio.create_task(self._probe_once(within_s), name="probe")
        return await asyncio.shield(self._probe)

    async def _probe_once(self, within_s: float) -> bool:
        if not self.is_connected:
            return False
        reconnections, pongs = self.reconnections, self.nc._pongs_received
        error = "the client does not read the answers"  # its flush returns at once then
        try:
            await run_within(within_s, self.flush())
        except (NatsError, OSError) as e:
            error = repr(e)
        if self.reconnections != reconnections or not self.nc.is_connected:
            return False  # the answer was lost with the earlier connection
        if self.nc._pongs_received > pongs:
            return True
        log.warning("NATS does not answer; connecting again", extra={"servers": self._servers, "error": error})
        await self.nc.force_reconnect()
        return False

    @property
    def max_body(self) -> int:
        """Return the largest body in bytes that NATS accepts.

        The sender must refuse a larger body before publishing it.
        """
        return int(self.nc.max_payload) - HEADROOM_BYTES

    async def request(self, subject: str, message: Request, reply: type[R], *, with_reports: bool = False) -> R:
        """Send `message` and return its typed reply.

        Raises `Unreachable` without a subscriber, or without a connection and room to wait for one,
        `DeadlineExceeded` after `message.deadline_ms`, `PayloadTooLarge` for a message that NATS
        would not take, and any `ThawError` that the other side answered with.

        Args:
            with_reports: The responder reports its progress; `ReplyLost` is raised soon after it
                has ended, or the request or reply was lost.
        """
        return decode_reply(await self.fetch(subject, message, with_reports=with_reports), reply)

    async def fetch(self, subject: str, message: Request, *, with_reports: bool = False) -> bytes:
        """Send `message` and return its reply, which `decode_reply` parses, in another thread too.

        Raises as `request`, but what the other side answers.
        """
        data, timeout_s = message.model_dump_json().encode(), message.deadline_ms / 1000
        if len(data) > self.max_body:
            raise PayloadTooLarge(f"A request on {subject} would have {len(data)} bytes, and NATS takes {self.max_body}")
        try:
            if with_reports:
                answer = await request_with_reports(self.nc, subject, data, timeout_s, carry())
            else:
                answer = await self.nc.request(subject, data, timeout=timeout_s, headers=carry())
        except NoRespondersError as e:
            raise Unreachable(f"No process answers on {subject}: it is stopped or starting. Check it with `thaw doctor`") from e
        except NatsTimeoutError as e:
            raise DeadlineExceeded(f"No answer on {subject} within {message.deadline_ms} ms") from e
        except ConnectionClosedError as e:
            raise Unreachable("The connection to NATS is closed") from e
        except OutboundBufferLimitError as e:
            raise Unreachable("This process is not connected to NATS, and has no room for more messages until it is") from e
        return answer.data

    async def publish(self, subject: str, message: Message) -> None:
        """Send an event. It is enqueued, not confirmed.

        Raises:
            nats.errors.Error: There is no connection, and no room to wait for one.
        """
        await self.nc.publish(subject, message.model_dump_json().encode(), headers=carry())

    def respond(
        self,
        subject: str,
        adapter: TypeAdapter[M],
        handler: Callable[[M], Awaitable[Message]],
        *,
        queue: str = "",
        concurrent: bool = False,
        most: int | None = None,
        is_temporary: bool = False,
    ) -> Responder:
        """Answer requests on `subject`; every exception becomes a `Failure`.

        Serial and in order unless `concurrent`. A temporary responder is started by its owner, and
        is forgotten once it has been stopped and dropped.

        Of concurrent requests, those beyond `most` (None: `CONCURRENT_HANDLERS`) wait.
        """

        async def reply(message: Msg) -> None:
            headers = message.headers or {}
            with carried(headers):
                async with reports(self.nc, message.reply, headers):
                    data = encode_reply(subject, await answer(subject, adapter, handler, message.data), self.max_body)
                if message.reply:
                    await self.nc.publish(message.reply, data)

        return self._subscribe(subject, reply, queue, concurrent=concurrent, most=most, is_temporary=is_temporary)

    def listen(self, subject: str, kind: type[E], handler: Callable[[E], Awaitable[None]]) -> Responder:
        """Handle events of one kind, serially and in order.

        A malformed or failing one is logged and dropped.

        So is one whose sender published it in another node's name: NATS keeps a node to the
        subjects of its own, and a subject with a wildcard for the node is held against the event's
        `node`.
        """

        async def hear(message: Msg) -> None:
            with carried(message.headers):
                try:
                    event = kind.model_validate_json(message.data)
                    if "*" in subject and message.subject != subject.replace("*", token(getattr(event, "node", ""))):
                        log.warning("dropped an event in another node's name", extra={"subject": message.subject})
                        return
                    await handler(event)
                except ValidationError as e:
                    log.warning("dropped a malformed event", extra={"subject": subject, "error": faults_of(e)})
                except Exception:
                    log.exception("an event handler failed", extra={"subject": subject})

        return self._subscribe(subject, hear)

    def _subscribe(
        self,
        subject: str,
        handle: Handle,
        queue: str = "",
        *,
        concurrent: bool = False,
        most: int | None = None,
        is_temporary: bool = False,
    ) -> Responder:
        responder = (
            ConcurrentResponder(self, subject, queue, handle, most)
            if concurrent
            else SubscribedResponder(self, subject, queue, handle)
        )
        if not is_temporary and not self._started:
            self._declared.append(responder)
        return responder

    async def _on_error(self, error: Exception) -> None:
        # While a server is away there are ten of them each second.
        if not self._stopping and self._away.allows(type(error).__name__):
            log.warning("NATS error", extra={"error": repr(error), "servers": self._servers})

    async def _on_disconnected(self) -> None:
        if not self._stopping:
            log.warning("disconnected from NATS; reconnecting")

    async def _on_reconnected(self) -> None:
        self._away.reset()
        self.reconnections += 1
        for listener in tuple(self._reconnect_listeners):
            listener()
        log.info("reconnected to NATS")

    async def _on_closed(self) -> None:
        if not self._stopping:
            log.error("the NATS connection closed for good")
            self.lost.set()


async def flush(client: Client, within: int = 10) -> None:
    """Wait until the server has processed all subscriptions and messages of a client so far.

    nats-py's flush sends its ping ahead of the data in its buffer, so the server may answer the
    ping before it has that data. The first flush empties the buffer; the second follows the data.

    Args:
        within: Seconds for each ping, after which NATS's error is raised.
    """
    await client.flush(timeout=within)
    await client.flush(timeout=within)


def survive_cancelled_flushes(client: Client) -> None:
    """Keep the client's read loop alive after a cancelled or timed-out flush.

    nats-py resolves the flush's future in any state. The `InvalidStateError` ends its read loop,
    and the process then receives nothing until its own pings have failed, some 15 s later.
    """
    resolve = client._process_pong

    async def process_pong() -> None:
        if client._pongs and client._pongs[0].done():
            client._pongs[0] = asyncio.get_running_loop().create_future()
        await resolve()

    client._process_pong = process_pong  # type: ignore[method-assign]


def yield_between_reads(client: Client) -> None:
    """Let other tasks run after each large read from NATS.

    nats-py reads on without yielding while its stream has bytes: a burst of short messages, 256 KiB
    of them or more, stalled a gateway for 0.15 s.
    """
    parse = client._ps.parse

    async def parse_and_yield(data: bytes = b"") -> None:
        await parse(data)
        if len(data) >= _YIELD_AFTER_BYTES:
            await asyncio.sleep(0)

    client._ps.parse = parse_and_yield  # type: ignore[method-assign]
