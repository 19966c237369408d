"""The messages between a fork server and its client, over a socket that preserves packets.

1. The client sends the names of the modules to import (`encode_modules`).
2. The server replies with `READY`, or ends.
3. For each start the client sends a `Start`, with file descriptors: a control socket, and one for
   each of `Start.files`. The server forks, and does not reply.
4. The new process sends its pid on the control socket, and runs once it has received `GO` there. It
   ends if the client closes the control socket instead. Thus a start whose client has given up does
   not happen later.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

READY = b"ready"
GO = b"go"
PACKET_BYTES = 1 << 18
MAX_FILES = 16


@dataclass(frozen=True)
class Start:
    """One module to run, as `python -m` does.

    Attributes:
        command: The whole command line, for other processes to read.
        files: File descriptors that the process has; the server receives them in this order.
        session: The process leads a session of its own.
    """

    module: str
    arguments: tuple[str, ...]
    command: tuple[str, ...]
    environment: dict[str, str]
    directory: str
    files: tuple[int, ...]
    session: bool

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, packet: bytes) -> Start:
        fields = json.loads(packet)
        return cls(**fields | {name: tuple(fields[name]) for name in ("arguments", "command", "files")})


def encode_modules(modules: tuple[str, ...]) -> bytes:
    return json.dumps(modules).encode()


def decode_modules(packet: bytes) -> tuple[str, ...]:
    return tuple(json.loads(packet))
