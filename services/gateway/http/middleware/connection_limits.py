"""uvicorn's HTTP protocol with limits on connections, headers and slow clients.

uvicorn has no options for these with httptools. A connection refused here has no request yet, so
the response is written to the socket directly, in OpenAI's format.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from services.gateway.domain.client_address import client_of_address
from services.gateway.http.error_formats import OPENAI
from shared.errors import HeadersTooLarge, InvalidRequest, RequestTimeout, ThawError, TooManyConnections, Unavailable

_MAX_PIPELINED = 16
"""Requests that may wait on one connection. Each costs a task here, and its client 40 bytes."""


@dataclass(frozen=True)
class ConnectionLimits:
    """Limits of connections, with timeouts in seconds.

    A head is a request line with its headers.
    """

    connections: int
    per_address: int
    head_bytes: int
    headers: int
    head_timeout: float
    write_timeout: float


@dataclass
class Connections:
    """Open connections of one server."""

    limits: ConnectionLimits
    total: int = 0
    by_address: Counter[str] = field(default_factory=Counter)

    def enter(self, address: str) -> ThawError | None:
        """Count a new connection. Returns the error if it exceeds a limit."""
        address = client_of_address(address)
        self.total += 1
        self.by_address[address] += 1
        if self.total > self.limits.connections:
            return Unavailable("The gateway has reached its limit of connections. Repeat the request later")
        if self.by_address[address] > self.limits.per_address:
            return TooManyConnections("This address has reached its limit of connections. Close some, or reuse them")
        return None

    def leave(self, address: str) -> None:
        address = client_of_address(address)
        self.total -= 1
        self.by_address[address] -= 1
        if not self.by_address[address]:
            del self.by_address[address]


class _Refused(Exception):
    """Stop parsing a request that was refused."""


class BoundedProtocol(HttpToolsProtocol):
    """One connection.

    It reads a head while `_head_timer` runs, then serves the request, then idles while uvicorn's
    keep-alive timer runs.
    """

    def __init__(self, *, connections: Connections, **options: Any) -> None:
        super().__init__(**options)
        self._connections = connections
        self._limits = connections.limits
        self._address: str | None = None
        self._received_bytes = self._head_bytes = self._head_fields = 0
        self._in_head = False
        self._head_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._refusal: ThawError | None = None

    # The connection.

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # uvicorn narrows the type
        super().connection_made(transport)
        self._address = self.client[0] if self.client else ""
        self._refusal = self._connections.enter(self._address)
        if self._refusal is not None:
            self.send_400_response("")
        else:
            self._start_head_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._address is not None:
            self._connections.leave(self._address)
            self._address = None
        self._stop_head_timer()
        self._stop_write_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refusal is not None:
            return
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self._in_head:
            self._received_bytes += len(data)
            if self._received_bytes > self._limits.head_bytes:
                self._refuse(HeadersTooLarge(f"The headers exceed the limit of {self._limits.head_bytes} bytes. Send fewer"))
        elif self.timeout_keep_alive_task is None and not self._is_responding:
            self._start_head_timer()  # bytes that start no request have stopped the keep-alive timer

    # A request's head.

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if len(self.pipeline) >= _MAX_PIPELINED:
            self._refusal = InvalidRequest(f"More than {_MAX_PIPELINED} requests are pipelined. Wait for responses")
            raise _Refused
        self._in_head = True
        self._received_bytes = self._head_bytes = self._head_fields = 0
        self._start_head_timer()

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._count(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        self._head_fields += 1
        if self._head_fields > self._limits.headers:
            self._refusal = HeadersTooLarge(f"The request has more than {self._limits.headers} headers. Send fewer")
            raise _Refused
        self._count(len(name) + len(value) + 4)
        super().on_header(name, value)

    def _count(self, size: int) -> None:
        self._head_bytes += size
        if self._head_bytes > self._limits.head_bytes:
            self._refusal = HeadersTooLarge(f"The headers exceed the limit of {self._limits.head_bytes} bytes. Send fewer")
            raise _Refused

    def _unsupported_upgrade_warning(self) -> None:
        """Serve a request without the upgrade that it asks for, as HTTP allows."""

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._stop_head_timer()
        super().on_headers_complete()

    def _start_head_timer(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(self._limits.head_timeout, self._on_head_timeout)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _on_head_timeout(self) -> None:
        self._head_timer = None
        if self._in_head:
            self._refuse(
                RequestTimeout(f"The headers were not complete within {self._limits.head_timeout:g} s. Repeat the request")
            )
        elif not self.transport.is_closing():
            self.transport.close()

    @property
    def _is_responding(self) -> bool:
        cycle: RequestResponseCycle | None = self.cycle
        return cycle is not None and not cycle.response_complete

    # Refusals.

    def _refuse(self, error: ThawError) -> None:
        self._refusal = error
        self.send_400_response(error.message)

    def send_400_response(self, msg: str) -> None:
        """Refuse a malformed request, and close; uvicorn calls it with its own message."""
        if self.transport.is_closing():
            return
        error = self._refusal = self._refusal or InvalidRequest(msg)
        if self._is_responding:  # an earlier request is being answered: bytes would be taken for part of its response
            self.transport.close()
            return
        body = json.dumps(OPENAI.body(error)).encode()
        head = STATUS_LINE[error.status] + b"content-type: application/json\r\nconnection: close\r\n"
        head += b"retry-after: 1\r\n" if error.status in (429, 503) else b""
        self.transport.write(b"%bcontent-length: %d\r\n\r\n%b" % (head, len(body), body))
        self.transport.close()

    # Clients that do not read.

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._write_timer is None:
            self._write_timer = self.loop.call_later(self._limits.write_timeout, self.transport.abort)

    def resume_writing(self) -> None:
        self._stop_write_timer()
        super().resume_writing()

    def _stop_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None
