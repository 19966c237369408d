"""Relay: `python -IS relay.py DESCRIPTOR PORT`.

It forwards connections of a Unix socket to a port of the loopback.

It runs by file name in a bare interpreter, like spawn.py, in the network namespace of an engine
that listens only on ports. A Unix socket's path is visible from every network namespace, so the
host can connect. When either side closes, the relay closes both: so the engine learns that its
client has left.
"""

import socket
import sys
import threading

_PIECE = 1 << 16


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


def serve(client: socket.socket, port: int) -> None:
    with client:
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


def main() -> int:
    listener, port = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
    threading.stack_size(1 << 18)
    while True:
        client, _ = listener.accept()
        threading.Thread(target=serve, args=(client, port), daemon=True).start()


if __name__ == "__main__":
    sys.exit(main())
