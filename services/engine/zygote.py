"""Zygote: a process with its imports done that forks engines.

Run `python -m services.engine.zygote SOCKET_PATH`.

It has no thread, no event loop and no CUDA context, and runs no parallel operation, because none of
these survives a fork. Nodeagents connect to its Unix socket and send one `EngineStart` or
`ExecutorStart` a line. The zygote answers with `EngineForked` or `ZygoteFailure`, and sends
`EngineExited` to every connection. It outlives its nodeagents, and its engines outlive it. SIGTERM
ends only the zygote.
"""

from __future__ import annotations

import fcntl
import json
import os
import selectors
import signal
import socket
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import NoReturn

from pydantic import ValidationError

from services.engine.process import end_process, import_libraries, prepare_environment, run_engine_process
from shared.contracts.base import Message
from shared.contracts.engine import EngineExited, EngineForked, EngineStart, ZygoteFailure, ZygoteReady
from shared.contracts.executor import PROCESS_START, ExecutorStart
from shared.errors import EngineFailed, InvalidRequest
from shared.imports import uncollected_imports
from shared.unix_sockets import lock_path

_LONGEST_LINE = 4 * 1024 * 1024
_SEND_WITHIN_S = 1.0
_SIGNALS = (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT)


class _Peer:
    """A connected nodeagent."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.pending = b""

    def fileno(self) -> int:
        return self.connection.fileno()


class Zygote:
    """Serves the listening socket until SIGTERM."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._selector = selectors.DefaultSelector()
        self._peers: list[_Peer] = []
        self._children: dict[int, str] = {}
        self._wakeup, self._wakeup_writer = socket.socketpair()
        self._stopping = False

    def serve(self) -> None:
        for end in (self._wakeup, self._wakeup_writer):
            end.setblocking(False)
        signal.set_wakeup_fd(self._wakeup_writer.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, self._on_stop)
        signal.signal(signal.SIGINT, self._on_stop)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._wakeup, selectors.EVENT_READ)
        while not self._stopping:
            for key, _ in self._selector.select():
                if key.fileobj is self._listener:
                    self._accept()
                elif key.fileobj is self._wakeup:
                    self._drain_wakeups()
                elif isinstance(key.data, _Peer):
                    self._read(key.data)
            self._reap()

    def _on_stop(self, *_: object) -> None:
        self._stopping = True

    def _drain_wakeups(self) -> None:
        try:
            while self._wakeup.recv(4096):
                pass
        except BlockingIOError:
            return

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        connection.settimeout(_SEND_WITHIN_S)
        peer = _Peer(connection)
        self._peers.append(peer)
        self._selector.register(connection, selectors.EVENT_READ, peer)
        self._send(peer, ZygoteReady())

    def _read(self, peer: _Peer) -> None:
        try:
            data = peer.connection.recv(65536)
        except OSError:
            data = b""
        peer.pending += data
        if not data or len(peer.pending) > _LONGEST_LINE:
            self._forget(peer)
            return
        *lines, peer.pending = peer.pending.split(b"\n")
        for line in lines:
            self._fork(peer, line)

    def _forget(self, peer: _Peer) -> None:
        if peer in self._peers:
            self._peers.remove(peer)
            self._selector.unregister(peer.connection)
            peer.connection.close()

    def _send(self, peer: _Peer, message: Message) -> None:
        try:
            peer.connection.sendall(message.model_dump_json().encode() + b"\n")
        except OSError:
            self._forget(peer)  # the peer is gone or does not read; it may connect again

    def _fork(self, peer: _Peer, line: bytes) -> None:
        try:
            start = PROCESS_START.validate_json(line)
        except ValidationError as e:
            self._send(
                peer,
                ZygoteFailure(
                    instance_id=_find_instance_id(line),
                    error=InvalidRequest(f"Neither an EngineStart nor an ExecutorStart: {e}").body(),
                ),
            )
            return
        received = time.monotonic()
        # Until the child installs its own handlers, a signal would run the zygote's handler there
        # and be lost.
        held = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        log = -1
        try:
            log = os.open(start.log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            pid = os.fork()
        except OSError as e:
            failure = EngineFailed(f"The engine process could not be forked: {e}")
            signal.pthread_sigmask(signal.SIG_SETMASK, held)
            if log >= 0:
                os.close(log)
            self._send(peer, ZygoteFailure(instance_id=start.instance_id, error=failure.body()))
            return
        if pid == 0:
            self._become_engine(start, log, received)
        signal.pthread_sigmask(signal.SIG_SETMASK, held)
        os.close(log)
        self._children[pid] = start.instance_id
        self._send(peer, EngineForked(instance_id=start.instance_id, pid=pid))

    def _become_engine(self, start: EngineStart | ExecutorStart, log: int, received: float) -> NoReturn:
        """In the child: detach from the zygote and run an engine.

        The child gets its own session, signal handlers, file descriptors and settings.
        """
        status = 1
        try:
            os.setsid()
            signal.set_wakeup_fd(-1)
            for signum in _SIGNALS:
                signal.signal(signum, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
            self._selector.close()
            for inherited in (self._listener, self._wakeup, self._wakeup_writer, *(p.connection for p in self._peers)):
                inherited.close()
            null = os.open(os.devnull, os.O_RDONLY)
            os.dup2(null, 0)
            os.dup2(log, 1)
            os.dup2(log, 2)
            os.closerange(3, _open_files_end())
            status = run_engine_process(start, received)
        except BaseException:  # a process boundary: nothing may return into the zygote's loop
            traceback.print_exc()
        finally:
            end_process(status)

    def _reap(self) -> None:
        for pid in list(self._children):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                exited = EngineExited(instance_id=self._children.pop(pid), pid=pid, returncode=os.waitstatus_to_exitcode(status))
                for peer in list(self._peers):
                    self._send(peer, exited)


def _find_instance_id(line: bytes) -> str:
    """Return the name by which the sender of an undecodable start waits; empty: it has none."""
    try:
        start = json.loads(line)
    except ValueError:
        return ""
    names = [start.get(field) for field in ("instance_id", "executor_id")] if isinstance(start, dict) else []
    return next((name for name in names if isinstance(name, str)), "")


def _open_files_end() -> int:
    """One more than the highest open file descriptor."""
    directory = Path("/proc/self/fd") if Path("/proc/self/fd").exists() else Path("/dev/fd")
    return max(int(entry.name) for entry in directory.iterdir()) + 1


def listen(path: Path) -> tuple[socket.socket, int] | None:
    """Listen on `path`.

    A stale socket file is replaced.

    Returns:
        The listening socket and the lock that guards it, or None if another zygote serves the
        socket.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = os.open(lock_path(path), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return None
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o177)
    try:
        listener.bind(str(path))
    finally:
        os.umask(before)
    listener.listen(16)
    return listener, lock


def main() -> int:
    if len(sys.argv) != 2:
        sys.stderr.write("usage: python -m services.engine.zygote SOCKET_PATH\n")
        return 2
    path = Path(sys.argv[1])
    try:
        served = listen(path)
    except OSError as e:
        sys.stderr.write(f"zygote: cannot listen on {path}: {e}\n")
        return 1
    if served is None:
        sys.stdout.write(f"zygote: {path} is already served\n")
        return 0
    listener, _ = served
    prepare_environment()
    with uncollected_imports():
        import_libraries()
    if threading.active_count() != 1:
        sys.stderr.write("zygote: the imports left threads behind; engines cannot be forked safely\n")
        return 1
    sys.stdout.write(f"zygote: ready on {path}\n")
    sys.stdout.flush()
    Zygote(listener).serve()
    path.unlink(missing_ok=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
