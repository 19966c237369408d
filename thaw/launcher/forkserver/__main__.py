"""The fork server: `python -m thaw.launcher.forkserver`; standard input is its client's socket.

It imports the modules that its client names, and forks a process for each start. It has no thread,
no event loop and no connection, because none of these survives a fork. It ends with its client.
"""

from __future__ import annotations

import importlib
import os
import runpy
import socket
import sys
from pathlib import Path

from shared.imports import uncollected_imports
from thaw.launcher.forkserver.cloning import fork_sibling, set_identity, supports_cloning
from thaw.launcher.forkserver.protocol import GO, MAX_FILES, PACKET_BYTES, READY, Start, decode_modules


def serve(client: socket.socket) -> Start | None:
    """Fork processes until the client closes its socket.

    Returns:
        None in the server; in a forked process the start to carry out.
    """
    while True:
        packet, files, _, _ = socket.recv_fds(client, PACKET_BYTES, 1 + MAX_FILES)
        if not packet:
            return None
        try:
            pid = fork_sibling()
        except OSError as e:
            sys.stderr.write(f"fork server: cannot fork: {e}\n")
            pid = -1
        if pid == 0:
            client.close()
            start = Start.decode(packet)
            _await_go(files[0])
            _become(start, files[1:])
            return start
        for file in files:
            os.close(file)


def _await_go(control: int) -> None:
    with socket.socket(fileno=control) as connection:
        connection.sendall(str(os.getpid()).encode())
        if connection.recv(len(GO)) != GO:
            os._exit(0)


def _become(start: Start, files: list[int]) -> None:
    """Give this process the session, files, environment and identity of `start`."""
    if start.session:
        os.setsid()
    # Move the files away first: a file's present number may be the wanted number of another one.
    above = max((*files, *start.files, 2)) + 1
    moved = [os.dup2(file, above + i, inheritable=False) for i, file in enumerate(files)]
    for file, number in zip(moved, start.files, strict=True):
        os.dup2(file, number)
    kept = {0, 1, 2, *start.files}
    for file in (int(entry.name) for entry in Path("/proc/self/fd").iterdir()):
        if file not in kept:
            try:
                os.close(file)
            except OSError:
                continue  # the directory that was listed
    os.environ.clear()
    os.environ.update(start.environment)
    os.chdir(start.directory)
    set_identity(list(start.command), start.environment)
    sys.argv[1:] = start.arguments
    sys.orig_argv[:] = start.command


def _import(modules: tuple[str, ...]) -> None:
    with uncollected_imports():
        for module in modules:
            importlib.import_module(_main_of(module))


def _main_of(module: str) -> str:
    """Return the name of the module that `python -m MODULE` runs."""
    return f"{module}.__main__" if hasattr(importlib.import_module(module), "__path__") else module


def main() -> Start | None:
    if not supports_cloning():
        sys.stderr.write("fork server: this system cannot fork siblings\n")
        return None
    client = socket.socket(fileno=os.dup(0))
    modules = client.recv(PACKET_BYTES)
    if not modules:
        return None
    _import(decode_modules(modules))
    if len(list(Path("/proc/self/task").iterdir())) != 1:
        sys.stderr.write("fork server: the imports left threads behind\n")
        return None
    try:
        client.send(READY)
        return serve(client)
    except ConnectionError:
        return None


if __name__ == "__main__":
    if (task := main()) is not None:
        # The module runs a second time, under the name __main__.
        sys.modules.pop(_main_of(task.module), None)
        runpy.run_module(task.module, run_name="__main__", alter_sys=True)
