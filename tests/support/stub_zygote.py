"""A zygote that forks stub engines: `python -m tests.support.stub_zygote SOCKET`.

Without torch it listens within half a second.

A card whose engine_args hold `stub: {"fork_error": …}` is answered with `ZygoteFailure`.
"""

from __future__ import annotations

import asyncio
import os
import selectors
import signal
import socket
import sys
import traceback
from pathlib import Path

from services.engine.zygote import listen
from shared.contracts.base import Message
from shared.contracts.engine import EngineExited, EngineForked, EngineStart, ZygoteFailure, ZygoteReady
from shared.errors import EngineFailed
from tests.support.stub_engine import StubEngine


class StubZygote:
    def __init__(self, listener: socket.socket, lock: int) -> None:
        self.listener = listener
        self.lock = lock
        self.selector = selectors.DefaultSelector()
        self.selector.register(self.listener, selectors.EVENT_READ)
        self.wake, self.woken = os.pipe()
        os.set_blocking(self.woken, False)
        self.selector.register(self.wake, selectors.EVENT_READ)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self.woken)
        self.clients: dict[socket.socket, bytes] = {}
        self.children: dict[int, str] = {}

    def run(self) -> None:
        while True:
            for key, _ in self.selector.select():
                if key.fileobj is self.listener:
                    client, _ = self.listener.accept()
                    self.say(client, ZygoteReady())
                    self.clients[client] = b""
                    self.selector.register(client, selectors.EVENT_READ)
                elif key.fileobj == self.wake:
                    os.read(self.wake, 64)
                    self.reap()
                elif isinstance(key.fileobj, socket.socket):
                    self.read(key.fileobj)

    def read(self, client: socket.socket) -> None:
        data = client.recv(1 << 16)
        if not data:
            self.selector.unregister(client)
            del self.clients[client]
            client.close()
            return
        *lines, self.clients[client] = (self.clients[client] + data).split(b"\n")
        for line in lines:
            self.fork(client, EngineStart.model_validate_json(line))

    def fork(self, client: socket.socket, start: EngineStart) -> None:
        if "fork_error" in start.card.spec.engine_args.get("stub", {}):
            self.say(client, ZygoteFailure(instance_id=start.instance_id, error=EngineFailed("the test refuses forks").body()))
            return
        pid = os.fork()
        if pid == 0:
            os._exit(self.child(start))
        self.children[pid] = start.instance_id
        self.say(client, EngineForked(instance_id=start.instance_id, pid=pid))

    def child(self, start: EngineStart) -> int:
        try:
            os.setsid()
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for descriptor in (self.listener.fileno(), self.lock, self.wake, self.woken, *(c.fileno() for c in self.clients)):
                os.close(descriptor)
            log = os.open(start.log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            os.dup2(log, 1)
            os.dup2(log, 2)
            os.environ.update(start.environment)
            return asyncio.run(StubEngine(start).run())
        except BaseException:
            traceback.print_exc()
            return 70

    def reap(self) -> None:
        for pid in list(self.children):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                exited = EngineExited(instance_id=self.children.pop(pid), pid=pid, returncode=os.waitstatus_to_exitcode(status))
                for client in self.clients:
                    self.say(client, exited)

    def say(self, client: socket.socket, message: Message) -> None:
        client.sendall(message.model_dump_json().encode() + b"\n")


if __name__ == "__main__":
    served = listen(Path(sys.argv[1]))
    if served is not None:
        StubZygote(*served).run()
