"""Listening sockets that outlive the process which serves them.

A client whose gateway was killed reconnects within a second or two; a gateway takes as long to
start. The kernel keeps the client's connection for the next process that accepts, as long as a
process holds the socket open: the supervisor does.
"""

from __future__ import annotations

import logging
import socket

log = logging.getLogger("thaw.supervisor")
VARIABLE = "THAW_GATEWAY_SOCKET"
"""Names the file descriptor of the listening socket that a process was given."""
_BACKLOG = 2048


class Listeners:
    """The sockets, by address.

    Closed for good when the mesh stops, so that no client waits in vain.
    """

    def __init__(self) -> None:
        self._open: dict[tuple[str, int], socket.socket] = {}

    def at(self, host: str, port: int) -> socket.socket | None:
        """The socket of this address, made at the first call.

        None if it cannot be had: a gateway of a supervisor that was killed still listens there, or
        the process is to fail by itself and say why.
        """
        address = host, port
        if address not in self._open:
            try:
                self._open[address] = _listen(host, port)
            except OSError as e:
                log.info("cannot listen on %s:%d: %s", host, port, e.strerror)
                return None
        return self._open[address]

    def close(self) -> None:
        for listener in self._open.values():
            listener.close()
        self._open.clear()


def _listen(host: str, port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(_BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener
