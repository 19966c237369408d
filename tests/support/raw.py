"""A client that disconnects in the middle of a response, or reads nothing."""

from __future__ import annotations

import json
import socket
from typing import Any


class RawClient:
    """One POST to /v1/chat/completions on its own socket.

    The request is sent when the constructor returns.
    """

    def __init__(self, port: int, model: str, *, tokens: int = 900, receive_buffer: int | None = None, **more: Any) -> None:
        body = json.dumps(
            {
                "model": model,
                "messages": [{"role": "user", "content": "Where does the ice go?"}],
                "max_tokens": tokens,
                "ignore_eos": True,
                **more,
            }
        ).encode()
        self._socket = socket.socket()
        if receive_buffer is not None:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self._socket.settimeout(180)
        self._socket.connect(("127.0.0.1", port))
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n"
        self._socket.sendall(head.encode() + body)

    def read(self, size: int = 65536) -> bytes:
        return self._socket.recv(size)

    def read_all(self) -> bytes:
        parts = []
        while part := self.read():
            parts.append(part)
        return b"".join(parts)

    def leave(self) -> None:
        self._socket.close()
