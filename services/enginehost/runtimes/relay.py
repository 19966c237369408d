"""`python -I relay.py DESCRIPTOR PORT`: hands connections of a listening Unix socket on to a port of the loopback.

Run by file name in a bare interpreter, as spawn.py, in the network namespace of an engine that listens on ports only: a Unix socket is found by its
path from every network, so the engine's host reaches it. An end on either side ends the connection on both: that is how an engine learns that its
client has left.
"""

import socket
import sys
import threading

_PIECE = 1 << 16


def hand_on(source: socket.socket, target: socket.socket) -> None:
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
            return  # it does not listen yet, or any more
        with engine:
            engine.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            back = threading.Thread(target=hand_on, args=(engine, client))
            back.start()
            hand_on(client, engine)
            back.join()


def main() -> int:
    listener, port = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
    threading.stack_size(1 << 18)
    while True:
        client, _ = listener.accept()
        threading.Thread(target=serve, args=(client, port), daemon=True).start()


if __name__ == "__main__":
    sys.exit(main())
