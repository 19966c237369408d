"""The HTTP server: uvicorn with an acceptor that shares the event loop.

uvloop accepts every connection of the backlog in one turn of the loop: 2,048 connections that
arrive together stall all requests for 0.1 to 0.2 s. The acceptor takes a few in each turn.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
import ssl
from collections.abc import Callable, Generator

import uvicorn

log = logging.getLogger(__name__)

_ACCEPTS_PER_TURN = 16
_MAX_HANDSHAKES = 512
"""Connections in setup, of which TLS is the slow part. Others wait in the kernel's backlog."""
_HANDSHAKE_TIMEOUT_S = 10.0
_DATE_S = 1.0
_MANY_CONNECTIONS = 1_000
_RETRY_DELAY_S = 0.5
"""Pause after the process or the machine ran out of file descriptors."""
_OUT_OF_FILES = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}


class Acceptor:
    """Accept connections, at most `_ACCEPTS_PER_TURN` in one turn of the event loop.

    Args:
        listener: Bound, listening and non-blocking. The caller closes it.
        factory: Makes the protocol of one connection.
        tls: Server-side TLS context, or None for plain TCP.
    """

    def __init__(self, listener: socket.socket, factory: Callable[[], asyncio.Protocol], tls: ssl.SSLContext | None = None) -> None:
        self._listener = listener
        self._factory = factory
        self._tls = tls
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._retry: asyncio.TimerHandle | None = None
        self._is_closed = False
        self._is_full = False
        self._resume()

    def close(self) -> None:
        """Stop accepting. Existing connections continue."""
        if self._is_closed:
            return
        self._is_closed = True
        self._pause()
        if self._retry is not None:
            self._retry.cancel()

    async def wait_closed(self) -> None:
        """Cancel connections that are still being set up."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _pause(self) -> None:
        self._loop.remove_reader(self._listener.fileno())

    def _resume(self) -> None:
        self._retry = None
        self._loop.add_reader(self._listener.fileno(), self._on_readable)

    def _on_readable(self) -> None:
        for _ in range(_ACCEPTS_PER_TURN):
            try:
                connection, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as e:
                if e.errno not in _OUT_OF_FILES:
                    raise
                log.warning("failed to accept a connection; retrying", extra={"error": repr(e), "retry_s": _RETRY_DELAY_S})
                self._pause()
                self._retry = self._loop.call_later(_RETRY_DELAY_S, self._resume)
                return
            connection.setblocking(False)
            task = self._loop.create_task(self._set_up(connection), name="accept")
            self._tasks.add(task)
            task.add_done_callback(self._on_set_up)
        if len(self._tasks) >= _MAX_HANDSHAKES:
            self._is_full = True
            self._pause()

    def _on_set_up(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if self._is_full and not self._is_closed and len(self._tasks) < _MAX_HANDSHAKES:
            self._is_full = False
            self._resume()

    async def _set_up(self, connection: socket.socket) -> None:
        timeout = _HANDSHAKE_TIMEOUT_S if self._tls is not None else None
        try:
            await self._loop.connect_accepted_socket(self._factory, connection, ssl=self._tls, ssl_handshake_timeout=timeout)
        except (OSError, ssl.SSLError) as e:  # the client disconnected, or does not use TLS
            log.debug("failed to set up a connection", extra={"error": repr(e)})
            connection.close()
        except asyncio.CancelledError:
            connection.close()
            raise


class HttpServer(uvicorn.Server):
    """uvicorn without its signal handlers and its acceptor.

    Args:
        config: uvicorn's configuration.
        listener: Bound, listening and non-blocking. `serve()` closes it.
    """

    def __init__(self, config: uvicorn.Config, listener: socket.socket) -> None:
        super().__init__(config)
        self._listener = listener
        self._acceptor: Acceptor | None = None
        self._stop_requested = asyncio.Event()

    def request_stop(self) -> None:
        """Make `serve()` stop accepting connections, wait for the open requests and return."""
        self.should_exit = True
        self._stop_requested.set()

    async def main_loop(self) -> None:
        """Renew the `date` header every second until a stop is requested.

        uvicorn's own loop wakes ten times a second to see whether it shall stop.
        """
        while not await self.on_tick(0):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stop_requested.wait(), _DATE_S)

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Leave signals to the service's runtime."""
        yield

    def activity(self) -> int | None:
        """Return the number of requests so far, or None while the server is busy.

        It is busy while a request is in flight or many connections are open.
        """
        state = self.server_state
        return None if state.tasks or len(state.connections) > _MANY_CONNECTIONS else state.total_requests

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=[])
        self._acceptor = Acceptor(self._listener, self._protocol, self.config.ssl)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._acceptor is not None:
            self._acceptor.close()
            self._listener.close()
            await self._acceptor.wait_closed()
        await super().shutdown(sockets=[])

    def _protocol(self) -> asyncio.Protocol:
        return self.config.http_protocol_class(  # type: ignore[call-arg]
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )
