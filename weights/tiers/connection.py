"""Read HTTP/1.1 responses straight into given memory, with cancellable waits.

`http.client` parses the responses. The socket is read in large pieces: the reader is woken once
there are 256 KiB (`SO_RCVLOWAT`) and takes all the data there is by then, which is faster than
`http.client`'s own reading and costs less CPU time (docs/adr/0020-remote-tiers.md).
"""

from __future__ import annotations

import http.client
import io
import select
import socket
import ssl
import struct
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from weights.tiers.port import Cancelled

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

CONNECT_S = 10.0
STALL_S = 20.0
_SLICE_MS = 100
_LOW_WATER_BYTES = 256 * 1024
"""More wakes the reader less often, and leaves the sender waiting for room meanwhile."""
_SMALL_BYTES = 64 * 1024
_SLICE = struct.pack("ll", 0, _SLICE_MS * 1000)
"""A `struct timeval`."""


@dataclass(frozen=True)
class Patience:
    """Timeouts of a connection in seconds: to connect, and to receive data."""

    connect_s: float = CONNECT_S
    stall_s: float = STALL_S


@dataclass(frozen=True)
class Origin:
    """The destination of a connection: scheme, host, port, and its proxy."""

    scheme: str
    host: str
    port: int
    proxy: tuple[str, int] | None = None
    proxy_authorization: str | None = None


class Connection:
    """A connection for one request at a time.

    Its methods raise `OSError`, `http.client.HTTPException` and `Cancelled`.
    """

    def __init__(
        self, origin: Origin, tls: ssl.SSLContext | None, patience: Patience, cancelled: threading.Event | None = None
    ) -> None:
        self.origin, self._patience = origin, patience
        deadline = time.monotonic() + patience.connect_s
        self._sock = _connect(*(origin.proxy or (origin.host, origin.port)), deadline, cancelled)
        try:
            if tls is not None:
                if origin.proxy is not None:
                    self._tunnel(cancelled)
                self._sock = _shake_hands(tls, self._sock, origin.host, deadline, cancelled)
        except BaseException:
            self._sock.close()
            raise

    def request(
        self, method: str, target: str, headers: Mapping[str, str], cancelled: threading.Event | None = None
    ) -> http.client.HTTPResponse:
        """Send a request without a body; its response, headers read.

        The body must be read before the next request.
        """
        lines = [f"{method} {target} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
        if any("\r" in line or "\n" in line for line in lines):
            raise ValueError("a line break in a request")
        self._sock.settimeout(self._patience.stall_s)
        self._sock.sendall("\r\n".join((*lines, "", "")).encode("latin-1"))
        if isinstance(self._sock, ssl.SSLSocket):
            self._sock.settimeout(0)
        else:  # the kernel waits, a slice at a time
            self._sock.settimeout(None)
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _SLICE)
        stream = _Stream(self._sock, cancelled, self._patience.stall_s)
        response = http.client.HTTPResponse(_Readable(stream), method=method)  # type: ignore[arg-type]  # all that it asks of a socket
        response.begin()
        return response

    def _tunnel(self, cancelled: threading.Event | None) -> None:
        name = f"{self.origin.host}:{self.origin.port}"
        authorization = self.origin.proxy_authorization
        headers = {"Host": name, **({"Proxy-Authorization": authorization} if authorization else {})}
        # The body of a refusal is not read: the connection is closed.
        response = self.request("CONNECT", name, headers, cancelled)
        if response.status != http.HTTPStatus.OK:
            raise ConnectionError(f"the proxy refuses connections to {name} ({response.status})")

    @property
    def alive(self) -> bool:
        """True if the server has not closed the connection.

        An idle connection has no data to read.
        """
        return not _wait(self._sock, select.POLLIN, 0)

    def close(self) -> None:
        self._sock.close()


class _Stream(io.RawIOBase):
    """A socket as a file.

    Waits in short slices, so that calling off and stalls are noticed. Closing it leaves the socket
    open.
    """

    def __init__(self, sock: socket.socket, cancelled: threading.Event | None, stall_s: float) -> None:
        self._sock, self._cancelled, self._stall_s = sock, cancelled, stall_s
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        self._tls = isinstance(sock, ssl.SSLSocket)
        self._low = 0

    def readable(self) -> bool:
        return True

    def readinto(self, into: WriteableBuffer, /) -> int:
        read = self._decrypt if self._tls else self._fill
        deadline = time.monotonic() + self._stall_s
        while True:
            if self._cancelled is not None and self._cancelled.is_set():
                raise Cancelled
            if (got := read(into)) is not None:
                return got
            if time.monotonic() > deadline:
                raise TimeoutError(f"no bytes for {self._stall_s:g} s")

    def _fill(self, into: WriteableBuffer) -> int | None:
        """Read available bytes; None if a slice brought none.

        A large read returns at least 256 KiB, or what arrived within a slice.
        """
        wanted = memoryview(into).nbytes
        self._low_water(min(wanted, _LOW_WATER_BYTES) if wanted > _SMALL_BYTES else 1)
        try:
            return self._sock.recv_into(into)
        except BlockingIOError:
            return None

    def _decrypt(self, into: WriteableBuffer) -> int | None:
        # What TLS has decrypted already is in no poll: a read is tried first.
        try:
            return self._sock.recv_into(into)
        except ssl.SSLWantReadError:
            self._poll.poll(_SLICE_MS)
            return None

    def _low_water(self, mark: int) -> None:
        if mark != self._low:
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, mark)
            self._low = mark


class _Readable:
    def __init__(self, stream: _Stream) -> None:
        self._stream = stream

    def makefile(self, mode: str) -> io.BufferedReader:
        return io.BufferedReader(self._stream)


def _connect(host: str, port: int, deadline: float, cancelled: threading.Event | None) -> socket.socket:
    """A TCP connection to the first address of `host` that answers, not blocking.

    Each address may take an equal part of the time that is left: an address that never answers
    (IPv6 without a route) must leave time for the others.
    """
    failure = OSError(f"{host} has no address")
    addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    for number, (family, kind, protocol, _, address) in enumerate(addresses):
        now = time.monotonic()
        until = now + max(0.0, deadline - now) / (len(addresses) - number)
        sock = socket.socket(family, kind, protocol)
        try:
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            try:
                sock.connect(address)
            except BlockingIOError:
                _wait_until_ready(sock, select.POLLOUT, until, cancelled)
            if error := sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                raise OSError(error, f"{host} port {port} cannot be reached")
        except OSError as e:
            sock.close()
            failure = e
        except BaseException:
            sock.close()
            raise
        else:
            return sock
    raise failure


def _shake_hands(
    tls: ssl.SSLContext, sock: socket.socket, host: str, deadline: float, cancelled: threading.Event | None
) -> ssl.SSLSocket:
    wrapped = tls.wrap_socket(sock, server_hostname=host, do_handshake_on_connect=False)
    try:
        wrapped.settimeout(0)
        while True:
            try:
                wrapped.do_handshake()
            except ssl.SSLWantReadError:
                _wait_until_ready(wrapped, select.POLLIN, deadline, cancelled)
            except ssl.SSLWantWriteError:
                _wait_until_ready(wrapped, select.POLLOUT, deadline, cancelled)
            else:
                return wrapped
    except BaseException:
        wrapped.close()
        raise


def _wait_until_ready(sock: socket.socket, events: int, deadline: float, cancelled: threading.Event | None) -> None:
    while not _wait(sock, events, _SLICE_MS):
        if cancelled is not None and cancelled.is_set():
            raise Cancelled
        if time.monotonic() > deadline:
            raise TimeoutError("no connection in time")


def _wait(sock: socket.socket, events: int, wait_ms: int) -> bool:
    poll = select.poll()
    poll.register(sock, events)
    return bool(poll.poll(wait_ms))
