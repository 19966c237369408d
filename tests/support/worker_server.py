"""Collect the tests, and fork pytest-xdist's workers: `python -m tests.support.worker_server`.

It works like `thaw.launcher.forkserver`; its client sends arguments of pytest instead of modules.
If pytest refuses them, the server replies with `REFUSED` and pytest's message instead of `READY`,
and ends.
"""

from __future__ import annotations

import contextlib
import gc
import os
import socket
import sys
from collections.abc import Generator
from pathlib import Path

import pytest

from tests.support import worker
from thaw.launcher.forkserver.__main__ import serve
from thaw.launcher.forkserver.protocol import PACKET_BYTES, READY, Start, decode_modules

REFUSED = b"refused"


class Refusals:
    """Keeps pytest's message about arguments that name no tests."""

    message: str | None = None

    @pytest.hookimpl(wrapper=True)
    def pytest_collection(self) -> Generator[None, object, object]:
        try:
            return (yield)
        except pytest.UsageError as e:
            self.message = "\n".join(map(str, e.args))
            raise


def main() -> Start | None:
    client = socket.socket(fileno=os.dup(0))
    arguments = client.recv(PACKET_BYTES)
    if not arguments:
        return None
    refusals = Refusals()
    # Errors of the collection are found and reported by each worker.
    with Path(os.devnull).open("w") as null, contextlib.redirect_stdout(null), contextlib.redirect_stderr(null):
        pytest.main([*decode_modules(arguments), "--collect-only"], plugins=[refusals])
    if refusals.message is not None:
        with contextlib.suppress(ConnectionError):
            client.send(REFUSED)
            client.send(refusals.message.encode()[:PACKET_BYTES])
        return None
    gc.collect()
    gc.freeze()
    if len(list(Path("/proc/self/task").iterdir())) != 1:
        sys.stderr.write("worker server: the collection left threads behind\n")
        return None
    with contextlib.suppress(ConnectionError):
        client.send(READY)
        return serve(client)
    return None


if __name__ == "__main__" and main() is not None:
    worker.serve()
