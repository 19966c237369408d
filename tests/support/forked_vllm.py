"""vLLM whose processes are forked: `PYTHON forked_vllm.py -m MODULE OPTION…`.

On cpu vLLM starts its core and its workers as new interpreters. Each of them imports all of vLLM,
which takes 9 CPU seconds. Here a process that has done the imports, and has no thread yet, forks a
server; the server forks what `multiprocessing` spawns, as a child of the process that spawns it.
A forked process gets a server of its own, as the core starts the workers.

The file runs by name in vLLM's environment, which has no packages of Thaw. Other commands than `-m`
are executed. `interpreter` makes a program of it.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import importlib.util
import json
import os
import runpy
import signal
import socket
import sys
from collections.abc import Sequence
from multiprocessing import util
from pathlib import Path
from types import ModuleType

_ROOT = Path(__file__).resolve().parents[2]
_IMPORTED = (
    "vllm.entrypoints.openai.api_server",
    "vllm.entrypoints.cli.serve",
    "vllm.v1.engine.core",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.cpu_worker",
)
"""Modules of the server, of later ranks, of the core and of the workers."""
_PR_SET_PDEATHSIG = 1
_PACKET_BYTES = 1 << 18
_MAX_FILES = 64
_STANDARD = (0, 1, 2)


def interpreter(python: str, directory: Path) -> str:
    """Return a program in `directory` that stands in for the interpreter `python` of vLLM."""
    program = directory / "forked-vllm"
    if not program.exists():
        program.write_text(f"#!{python}\nimport runpy\nrunpy.run_path({__file__!r}, run_name='__main__')\n")
        program.chmod(0o755)
    return str(program)


def _cloning() -> ModuleType:
    """Load the module from its file: the package would import others."""
    path = _ROOT / "thaw" / "launcher" / "forkserver" / "cloning.py"
    spec = importlib.util.spec_from_file_location("thaw_cloning", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Forking:
    """Starts the processes of `multiprocessing` by this process's fork server."""

    def __init__(self, server: socket.socket) -> None:
        self._server = server

    def spawn(self, path: bytes, arguments: Sequence[bytes | str], files: Sequence[int]) -> int:
        """Do as `multiprocessing.util.spawnv_passfds`."""
        reader, writer = os.pipe()
        kept = sorted({*files})
        start = {
            "arguments": [os.fsdecode(a) for a in arguments],
            "files": kept,
            "environment": dict(os.environ),
            "directory": str(Path.cwd()),
        }
        try:
            socket.send_fds(self._server, [json.dumps(start).encode()], [writer, *_STANDARD, *kept])
        finally:
            os.close(writer)
        with open(reader) as file:  # noqa: PTH123  # a file descriptor
            return int(file.read())


class Start:
    """A process that a fork server forks on request."""

    def __init__(self, packet: bytes, files: list[int]) -> None:
        fields = json.loads(packet)
        self._arguments: list[str] = fields["arguments"]
        self._environment: dict[str, str] = fields["environment"]
        self._directory: str = fields["directory"]
        self._numbers = [*_STANDARD, *fields["files"]]
        self._files = files

    def become(self, cloning: ModuleType) -> None:
        """Give this process the files, the environment and the command line of the start."""
        # Move the files away first: a file's present number may be the wanted one of another.
        above = max(*self._numbers, *self._files) + 1
        moved = [os.dup2(file, above + i, inheritable=False) for i, file in enumerate(self._files)]
        for file, number in zip(moved, self._numbers, strict=True):
            os.dup2(file, number)
        for number in (int(name) for name in os.listdir("/proc/self/fd")):  # noqa: PTH208
            if number not in self._numbers:
                with contextlib.suppress(OSError):  # the directory that was listed
                    os.close(number)
        os.environ.clear()
        os.environ.update(self._environment)
        os.chdir(self._directory)
        cloning.set_identity(self._arguments, self._environment)
        if threads := self._environment.get("OMP_NUM_THREADS"):  # read when libraries are loaded
            import torch

            torch.set_num_threads(int(threads))

    def run(self) -> None:
        """Run the statement that `multiprocessing` gives a new interpreter."""
        statement = self._arguments[self._arguments.index("-c") + 1]
        sys.argv[:] = ["-c", "--multiprocessing-fork"]
        main = sys.modules["__main__"] = ModuleType("__main__")
        exec(statement, main.__dict__)


def _serve(requests: socket.socket, cloning: ModuleType) -> Start:
    """Fork until the client closes its socket; return the start in each forked process."""
    while True:
        packet, files, _, _ = socket.recv_fds(requests, _PACKET_BYTES, _MAX_FILES)
        if not packet:
            os._exit(0)
        pid = cloning.fork_sibling()
        if pid == 0:
            os.close(files[0])
            return Start(packet, files[1:])
        os.write(files[0], str(pid).encode())
        for file in files:
            os.close(file)


def _fork_server(cloning: ModuleType) -> Start | None:
    """Fork a fork server, and start the processes of `multiprocessing` by it.

    Returns:
        None in this process; in a process that the server forked, the start to carry out.
    """
    client, requests = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork():
        requests.close()
        util.spawnv_passfds = Forking(client).spawn  # type: ignore[assignment]  # no public hook has its place
        return None
    client.close()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    return _serve(requests, cloning)


def _import() -> None:
    """Import vLLM without garbage collections, and keep what it makes out of later ones."""
    # OpenBLAS would start threads; a process with threads cannot fork.
    before = os.environ.get("OPENBLAS_NUM_THREADS")
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    gc.disable()
    for module in _IMPORTED:
        importlib.import_module(module)
    gc.freeze()
    gc.enable()
    del os.environ["OPENBLAS_NUM_THREADS"]
    if before is not None:
        os.environ["OPENBLAS_NUM_THREADS"] = before
    assert len(os.listdir("/proc/self/task")) == 1, "the imports of vLLM left threads behind"  # noqa: PTH208


def main() -> None:
    if sys.argv[1:2] != ["-m"]:
        os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
    cloning = _cloning()
    _import()
    started: Start | None = None
    while (received := _fork_server(cloning)) is not None:
        started = received
        started.become(cloning)
    if started is not None:
        started.run()
        return
    module, *options = sys.argv[2:]
    sys.argv[:] = [module, *options]
    sys.modules.pop(module, None)  # run it as the main program, not as the imported module
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
