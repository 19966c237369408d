"""Relay: `python -IS relay.py DESCRIPTOR PORT`.

It forwards connections of a Unix socket to a port of the loopback.

It runs by file name in a bare interpreter, like spawn.py, in the network namespace of an engine
that listens only on ports. A Unix socket's path is visible from every network namespace, so the
host can connect. When either side closes, the relay closes both: so the engine learns that its
client has left. Connections beyond its descriptors wait in the socket's backlog.
"""

import resource
import socket
import sys
import threading
import time

_PIECE = 1 << 16
_OTHER_DESCRIPTORS = 16
_AGAIN_S = 0.1


def forward(source: socket.socket, target: socket.socket) -> None:
    try:
        while data := source.recv(_PIECE):
            target.sendall(data)
    except OSError:
        pass
    for end in (source, target):
        try:
            end.shutdown(socket.SHUT_RDWR)
        except OSError:
            continue


def serve(client: socket.socket, port: int, room: threading.Semaphore) -> None:
    try:
        with client:
            connect(client, port)
    finally:
        room.release()


def connect(client: socket.socket, port: int) -> None:
    try:
        engine = socket.create_connection(("127.0.0.1", port))
    except OSError:
        return  # the engine does not listen
    with engine:
        engine.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        back = threading.Thread(target=forward, args=(engine, client))
        back.start()
        forward(client, engine)
        back.join()


def raise_limit() -> int:
    """Allow as many descriptors as this process may have, and return their number."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = 1 << 16 if hard == resource.RLIM_INFINITY else min(hard, 1 << 16)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return most


def main() -> int:
    listener, port = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
    threading.stack_size(1 << 18)
    room = threading.Semaphore(max(1, (raise_limit() - _OTHER_DESCRIPTORS) // 2))
    while True:
        room.acquire()
        client = None
        try:
            client, _ = listener.accept()
            threading.Thread(target=serve, args=(client, port, room), daemon=True).start()
        except (OSError, RuntimeError):  # the machine has no descriptor, memory or thread left
            if client is not None:
                client.close()
            room.release()
            time.sleep(_AGAIN_S)


if __name__ == "__main__":
    sys.exit(main())
