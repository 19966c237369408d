"""Fork the services and the command lines that tests start, instead of importing them each time.

Importing a service takes half to a whole CPU second, and the suite starts hundreds of them.
`install` makes `subprocess.Popen` fork `[sys.executable, "-m", MODULE, ...]` from a fork server
(`thaw.launcher.forkserver`), which a test process starts when it first needs it. The new process is
a child of the test process and runs the module as `python -m` does. Other commands, and those with
unusual options, are executed.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from thaw.launcher.forkserver.client import ForkServer
from thaw.launcher.forkserver.cloning import supports_cloning
from thaw.launcher.services import SERVICES

ROOT = Path(__file__).resolve().parents[2]
FORKED = (*SERVICES, "services.enginehost", "thaw.cli.app")
_COMMANDS = tuple(f"thaw.cli.{name}" for name in ("up", "keys", "models", "ps", "doctor", "logs"))
"""Modules that the command line imports when they are used."""
_READY_WITHIN_S = 60.0
_execute: Callable[..., None] = subprocess.Popen._execute_child  # type: ignore[attr-defined]  # no public hook has its place
_server: ForkServer | None = None
_is_enabled = True


def install() -> None:
    """Fork from here on; where a system has no fork server, commands are executed."""
    subprocess.Popen._execute_child = _execute_child  # type: ignore[attr-defined]


@contextlib.contextmanager
def executed() -> Iterator[None]:
    """Execute all commands inside the block, as users do."""
    global _is_enabled
    before, _is_enabled = _is_enabled, False
    try:
        yield
    finally:
        _is_enabled = before


def close() -> None:
    """End this process's fork server; services that it forked keep running."""
    global _server
    if _server is not None:
        _server.close()
        _server = None


def _execute_child(
    process: subprocess.Popen[Any],
    args: Any,
    executable: Any,
    preexec_fn: Any,
    close_fds: bool,
    pass_fds: tuple[int, ...],
    cwd: Any,
    env: dict[str, str] | None,
    startupinfo: Any,
    creationflags: int,
    shell: bool,
    *streams_and_rest: Any,
) -> None:
    """Fork, or execute as `Popen` does: the parameters are those of its private method."""
    streams, rest = streams_and_rest[:6], streams_and_rest[6:]
    environment = dict(os.environ if env is None else env)
    _, *identity, start_new_session, process_group = rest
    is_usual = preexec_fn is None and close_fds and not shell and process_group < 0 and _are_unset(identity)
    is_forked = is_usual and _is_enabled and _is_forked(args) and _has_same_interpreter(environment)
    server = _fork_server() if is_forked else None
    if server is None:
        _execute(
            *(process, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo, creationflags, shell),
            *streams_and_rest,
        )
        return
    theirs = (streams[0], streams[3], streams[5])
    files = {number: number if stream < 0 else stream for number, stream in enumerate(theirs)} | {fd: fd for fd in pass_fds}
    process.pid = server.start(
        *args[2:], environment=environment, directory=Path(cwd or Path.cwd()), files=files, session=start_new_session
    )
    process._child_created = True  # type: ignore[attr-defined]  # as the replaced method does
    process._close_pipe_fds(*streams)  # type: ignore[attr-defined]


def _fork_server() -> ForkServer | None:
    """Return this process's fork server; None where the kernel does not support it."""
    global _server
    if _server is None and supports_cloning():
        _server = ForkServer(FORKED + _COMMANDS, os.environ | {"PYTHONUNBUFFERED": "1"}, ROOT)
        assert _server.await_ready(_READY_WITHIN_S), "the tests' fork server ended, or imports for a minute"
    return _server


def _is_forked(args: Any) -> bool:
    return isinstance(args, (list, tuple)) and len(args) > 2 and tuple(args[:2]) == (sys.executable, "-m") and args[2] in FORKED


def _has_same_interpreter(environment: dict[str, str]) -> bool:
    """True if the interpreter and its imports would be the same with this environment."""
    names = {name for name in (*environment, *os.environ) if name.startswith(("PYTHON", "LD_"))} - {"PYTHONUNBUFFERED"}
    return all(environment.get(name) in (os.environ.get(name), str(ROOT)) for name in names)


def _are_unset(identity: list[Any]) -> bool:
    """True if group, groups, user and umask of the process are those of the caller."""
    return all(value is None or value == -1 for value in identity)
