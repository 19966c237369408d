"""Fork the processes that tests start, instead of importing their modules each time.

Importing a service takes half to a whole CPU second, importing torch and transformers four, and the
suite starts hundreds of processes. `install` makes `subprocess.Popen` fork
`[sys.executable, "-m", MODULE, ...]` from a fork server (`tests.support.fork_server`), which a test
process starts when it first needs it. The new process is a child of the test process and runs the
module as `python -m` does. Nodeagents and supervisors that were forked so fork what they start in
the same way. Other commands, and those with unusual options, are executed.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support import worker
from thaw.launcher.forkserver.client import MODULE, ForkServer, ForkServerFailed
from thaw.launcher.forkserver.cloning import supports_cloning
from thaw.launcher.forkserver.protocol import PACKET_BYTES
from thaw.launcher.services import SERVICES

ROOT = Path(__file__).resolve().parents[2]
SERVER = "tests.support.fork_server"
WORKER_SERVER = "tests.support.worker_server"
ENGINES = (
    "services.engine",
    "services.engine.zygote",
    "tests.support.engine_without_gpu",
    "tests.support.faulty_zygote",
    "tests.support.paced_zygote",
)
"""Modules of engines, which import torch and transformers."""
BENCHES = ("bench.gpu", "bench.gpu.models", "bench.gpu.serving", "thaw")
"""Modules of a benchmark that start meshes, and the command line as benchmarks start it."""
_TORCH_USERS = ("bench.loader_case", "tests.support.mapped_gpu_units", *BENCHES)
"""Other modules that import torch, or start those that do; a fork server does not import them."""
_LIGHT = (*SERVICES, "services.enginehost", "thaw.cli.app", "thaw.launcher.supervisor")
_TOOLS = ("simulator", "weights.load", "weights.convert")
"""Modules that the command line and the gateway run as processes of their own."""
_STUBS = ("tests.support.stub_engine", "tests.support.stub_zygote", "tests.support.stopping_loader")
_PARSER = "services.gateway.http.parsing.parser_worker"
"""Imported with the gateway, which tests have in their own process, too."""
FORKED = (*_LIGHT, _PARSER, *_TOOLS, *_STUBS, *ENGINES, *_TORCH_USERS, worker.MODULE)
_COMMANDS = tuple(f"thaw.cli.{name}" for name in ("up", "keys", "models", "ps", "doctor", "logs"))
"""Modules that the command line imports when they are used."""
_LATE = (
    "alembic.command",
    "anyio._backends._asyncio",
    "httpcore._api",
    "opentelemetry.exporter.otlp.proto.common.trace_encoder",
    "rich._emoji_codes",
    "uvicorn.protocols.http.httptools_impl",
)
"""Modules that services and the command line import in their first seconds, or with a first use.

Not grpc's, whose state does not survive a fork.
"""
_LIBRARIES = "tests.support.engine_libraries"
_READ_BY_PYTHON = ("PYTHON", "LD_")
_READ_BY_TORCH = ("OMP_", "MKL_", "OPENBLAS_", "TORCH", "CUDA_", "HF_", "TRANSFORMERS_")
"""Prefixes of environment variables that are read at the start and during imports."""
_READY_WITHIN_S = 120.0
_COLLECTED_WITHIN_S = 600.0
"""A collection compiles all tests of a new clone: half a minute of CPU time."""
_REFUSAL_WITHIN_S = 5.0
"""The message follows at once, unless the server hangs."""
_execute: Callable[..., None] = subprocess.Popen._execute_child  # type: ignore[attr-defined]  # no public hook has its place
_servers: dict[bool, ForkServer] = {}
"""This test process's fork servers: without torch, and with it."""
_workers: _WorkerServer | None = None
"""In the controller of pytest-xdist: the fork server of its workers."""
_starting = threading.Lock()
"""Held while one is started: a mesh's processes are started by several threads."""
_own: ForkServer | None = None
"""In a forked service: the fork server that was forked from it."""
_is_service = False
_is_enabled = True


class _WorkerServer(ForkServer):
    """The fork server of pytest-xdist's workers."""

    def refusal(self) -> str | None:
        """Return pytest's message about the arguments of a server that is not ready, if any."""
        self._socket.settimeout(_REFUSAL_WITHIN_S)
        with contextlib.suppress(OSError):
            return self._socket.recv(PACKET_BYTES).decode() or None
        return None


class _OwnServer(ForkServer):
    """A fork server that was forked from this process, and ends with it."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._is_ready = True


def install() -> None:
    """Fork from here on; where a system has no fork server, commands are executed."""
    subprocess.Popen._execute_child = _execute_child  # type: ignore[attr-defined]


def install_workers(arguments: Sequence[str]) -> None:
    """Fork pytest-xdist's workers from a process that collects the tests of `arguments` once.

    Raises:
        pytest.UsageError: The arguments name no tests.
    """
    global _workers
    if supports_cloning():
        environment = os.environ | {"OPENBLAS_NUM_THREADS": "1"}  # a process with threads cannot fork
        _workers = _WorkerServer((*arguments, "-n", "0"), environment, Path.cwd(), program=WORKER_SERVER)
        if _workers.await_ready(_COLLECTED_WITHIN_S):
            worker.install()
        elif (message := _workers.refusal()) is not None:
            raise pytest.UsageError(message)


def install_in_service() -> None:
    """Fork in the processes of this server that get a server of their own."""
    global _is_service
    _is_service = True
    install()


def use(connection: socket.socket) -> None:
    """Fork from the server at the other end."""
    global _own
    _own = _OwnServer(connection)


@contextlib.contextmanager
def executed() -> Iterator[None]:
    """Execute all commands inside the block, as users do."""
    global _is_enabled
    before, _is_enabled = _is_enabled, False
    try:
        yield
    finally:
        _is_enabled = before


def is_enabled() -> bool:
    """Return whether commands are forked, outside the blocks of `executed`."""
    return _is_enabled


def close() -> None:
    """End this process's fork servers; processes that they forked keep running."""
    global _workers
    while _servers:
        _servers.popitem()[1].close()
    if _workers is not None:
        _workers.close()
        _workers = None


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
    is_forked = is_usual and _is_enabled and _is_forked(args) and _has_same_imports(args[2], environment)
    arguments = [os.fspath(a) for a in args[3:]] if is_forked else []
    server = _server_for(args[2], arguments, environment) if is_forked else None
    if server is not None:
        theirs = (streams[0], streams[3], streams[5])
        files = {number: number if stream < 0 else stream for number, stream in enumerate(theirs)} | {fd: fd for fd in pass_fds}
        try:
            process.pid = server.start(
                args[2],
                *arguments,
                environment=environment,
                directory=Path(cwd or Path.cwd()),
                files=files,
                session=start_new_session,
            )
        except ForkServerFailed:
            if not _is_service:
                raise
        else:
            process._child_created = True  # type: ignore[attr-defined]  # as the replaced method does
            process._close_pipe_fds(*streams)  # type: ignore[attr-defined]
            return
    _execute(
        *(process, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo, creationflags, shell),
        *streams_and_rest,
    )


def _server_for(module: str, arguments: list[str], environment: Mapping[str, str]) -> ForkServer | None:
    """Return the fork server for a module; None where it has to be executed."""
    if _is_service:
        return _own
    if module == worker.MODULE:
        return _workers
    if module == MODULE or not supports_cloning():
        return None  # tests of the launcher's fork server start the real one
    has_torch = module in (*ENGINES, *_TORCH_USERS) or _starts_engines(module, arguments, environment)
    with _starting:
        # The command line needs no server without torch, as no test measures its memory.
        if module == "thaw.cli.app" and True in _servers:
            has_torch = True
        if has_torch not in _servers:
            modules = (
                *((_LIBRARIES,) if has_torch else ()),
                *_LIGHT,
                *_TOOLS,
                *_COMMANDS,
                *_LATE,
                *_STUBS,
                *(ENGINES if has_torch else ()),
            )
            # OpenBLAS starts threads when NumPy is imported; a process with threads cannot fork.
            # With the variables of a mesh whose command line runs in this process, it would count
            # as one of that mesh.
            read = {k: v for k, v in os.environ.items() if not k.startswith("THAW_")}
            read |= {"PYTHONUNBUFFERED": "1", "OPENBLAS_NUM_THREADS": "1"}
            server = ForkServer(modules, read, ROOT, program=SERVER)
            _servers[has_torch] = server
            assert server.await_ready(_READY_WITHIN_S), "the tests' fork server ended, or imports for two minutes"
        return _servers[has_torch]


def _starts_engines(module: str, arguments: list[str], environment: Mapping[str, str]) -> bool:
    """True if the process starts a real zygote, itself or in a mesh."""
    starts = module in ("services.nodeagent", "thaw.launcher.supervisor") or (module == "thaw.cli.app" and "up" in arguments)
    return (
        starts
        and environment.get("THAW_ZYGOTE", "").lower() != "false"
        and environment.get("THAW_ZYGOTE_MODULE", ENGINES[1]) in ENGINES
    )


def _is_forked(args: Any) -> bool:
    return (
        isinstance(args, (list, tuple))
        and len(args) > 2
        and tuple(args[:2]) == (sys.executable, "-m")
        and args[2] in (*FORKED, MODULE)
    )


def _has_same_imports(module: str, environment: Mapping[str, str]) -> bool:
    """True if the interpreter and its imports would be the same with this environment."""
    read = _READ_BY_PYTHON + (_READ_BY_TORCH if module in (*ENGINES, *_TORCH_USERS) else ())
    names = {name for name in (*environment, *os.environ) if name.startswith(read)} - {"PYTHONUNBUFFERED"}
    return all(
        environment.get(name) == os.environ.get(name) or set(environment.get(name, "").split(os.pathsep)) == {str(ROOT)}
        for name in names
    )


def _are_unset(identity: list[Any]) -> bool:
    """True if group, groups, user and umask of the process are those of the caller."""
    return all(value is None or value == -1 for value in identity)
