"""The client of the loader's socket: messages that it does not know."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

import pytest

from shared.errors import Unreachable
from weights.client import attach


@pytest.mark.parametrize("line", [b"{}\n", b'{"kind": "of a newer version"}\n', b"\xff\n", b"\n"])
def test_unknown_messages_are_typed_errors(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "loader.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.sendall(line)
                connection.recv(65536)

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        with pytest.raises(Unreachable, match="not known here"):
            attach(path, source="/models/m", timeout=60)
        thread.join(60)
