"""A connection between engines that carries keys and values."""

from __future__ import annotations

import contextlib
import socket
from dataclasses import dataclass

from services.engine.domain.frames import HEADER_BYTES, decode_header, decode_message, encode_head
from services.engine.domain.kv_frames import KEYS_AND_VALUES
from shared.contracts.kv_transfer import KvMessage
from shared.engines.peer_sockets import receive

_SEND_WITHIN_S = 10.0


@dataclass(frozen=True)
class KvFrame:
    """A message and the bytes that follow it."""

    message: KvMessage
    data: bytearray


class KvConnection:
    """An authenticated connection. One thread uses it at a time; another may close it."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    def send(self, message: KvMessage, data: memoryview | bytes = b"") -> None:
        """Send a message and its data.

        Raises:
            OSError: The connection is lost; `TimeoutError` if the other side does not read.
        """
        self._sock.settimeout(_SEND_WITHIN_S)
        self._sock.sendall(encode_head(KEYS_AND_VALUES, message, len(data)))
        if data:
            self._sock.sendall(data)

    def get(self, max_data_bytes: int, within_s: float) -> KvFrame:
        """Return the next frame.

        Args:
            max_data_bytes: Most data of the frame: a longer one ends the connection.
            within_s: Seconds that the other side may send nothing.

        Raises:
            ProtocolError: It is no frame.
            EOFError: The other side has ended.
            OSError: The connection is lost; `TimeoutError` if nothing arrives.
        """
        self._sock.settimeout(within_s)
        lengths = decode_header(KEYS_AND_VALUES, bytes(receive(self._sock, HEADER_BYTES)), max_data_bytes)
        message = decode_message(KEYS_AND_VALUES, bytes(receive(self._sock, lengths.message)))
        return KvFrame(message, receive(self._sock, lengths.data))

    def close(self) -> None:
        """Wake the thread that uses the connection, and close it."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()
