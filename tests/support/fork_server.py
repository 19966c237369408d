"""The tests' fork server: `python -m tests.support.fork_server`, in place of the launcher's own.

It works like `thaw.launcher.forkserver`. In addition a forked service that starts processes itself
gets a fork server of its own, so that its zygotes and engines are forked too, as its children. That
server is forked from the service before the service runs, while it has no thread.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import runpy
import signal
import socket
import sys
import threading
import traceback
import weakref
from typing import Any, NoReturn, cast

from tests.support import forking
from tests.support.reaping import VARIABLE
from thaw.launcher.forkserver import __main__ as launcher_server
from thaw.launcher.forkserver.client import MODULE
from thaw.launcher.forkserver.cloning import set_identity
from thaw.launcher.forkserver.protocol import Start

_STARTERS = ("services.nodeagent", "thaw.cli.app", "thaw.launcher.supervisor", *forking.BENCHES)
"""Modules that start others of `forking.FORKED`."""
_REREAD = ("huggingface_hub", "transformers")
"""Packages that read the environment when they are imported; engines need them offline."""


def _run(start: Start) -> NoReturn:
    """Run the module of `start`, or of a start that a fork server of this process receives."""
    _keep_libraries()
    while start.module == MODULE or start.module in _STARTERS:
        received = launcher_server.main() if start.module == MODULE else _fork_server_for(start)
        if received is None:
            break
        start = received
    if start.module == MODULE:
        os._exit(0)
    if start.module not in forking.ENGINES:
        for name in [n for n in sys.modules if n.partition(".")[0] in _REREAD]:
            del sys.modules[name]
    _end(_status_of(start.module))


def _keep_libraries() -> None:
    """Leave out the finalizers of imported modules at the exit, as `_end` keeps all modules.

    torch registers 385, which take 50 ms of CPU time.
    """
    registry = cast("dict[Any, Any]", weakref.finalize._registry)  # type: ignore[attr-defined]  # no public view has it
    for finalizer in registry:
        finalizer.atexit = False


def _fork_server_for(start: Start) -> Start | None:
    """Fork a fork server for this process.

    Returns:
        None in this process; in a process that the server forked, the start to carry out.
    """
    client, server = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() != 0:
        server.close()
        forking.use(client)
        return None
    # Other processes do not take it for the service, and it gets no signal of the service's group.
    os.setsid()
    set_identity(["tests' fork server of", start.module], {VARIABLE: os.environ.get(VARIABLE, "")})
    null = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(null, number)
    client.close()
    # Connections, listeners and files of the service stay its own.
    os.dup2(server.detach(), 3, inheritable=False)
    os.closerange(4, os.sysconf("SC_OPEN_MAX"))
    received: Start | None = None
    with contextlib.suppress(ConnectionError):
        received = launcher_server.serve(socket.socket(fileno=3))
    if received is None:
        os._exit(0)
    return received


def _status_of(module: str) -> int:
    """Run a module as `python -m` does, and return the exit status."""
    main = f"{module}.__main__" if f"{module}.__main__" in sys.modules else module
    sys.modules.pop(main, None)
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as e:
        if e.code is None or isinstance(e.code, int):
            return (e.code or 0) & 0xFF
        sys.stderr.write(f"{e.code}\n")
        return 1
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def _end(status: int) -> NoReturn:
    """Exit as the interpreter does, but keep all modules: to destroy them copies their memory."""
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads, as the interpreter does
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            status = status or 120
    os._exit(status)


if __name__ == "__main__":
    # A second copy of this module would have a state of its own.
    from tests.support import fork_server

    forking.install_in_service()
    received = launcher_server.main()
    if received is not None:
        fork_server._run(received)
