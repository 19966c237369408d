"""A process tree that holds memory: `python ballast.py MIB CHILDREN`.

It prints "ready", then answers each line with a digest of all its memory.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import sys
from multiprocessing.connection import Connection


def hold(size: int) -> bytearray:
    return bytearray(os.urandom(1 << 20) * size)


def child(size: int, pipe: Connection) -> None:
    held = hold(size)
    pipe.send("ready")
    while pipe.recv():
        pipe.send(hashlib.sha256(held).hexdigest())


def main() -> None:
    size, children = int(sys.argv[1]), int(sys.argv[2])
    pipes = []
    for _ in range(children):
        ours, theirs = multiprocessing.Pipe()
        multiprocessing.Process(target=child, args=(size, theirs), daemon=True).start()
        ours.recv()
        pipes.append(ours)
    # Last: memory shared with children by a fork would be mapped by all of them, and stay.
    held = hold(size)
    print("ready", flush=True)  # noqa: T201  # it talks with its parent
    for _ in sys.stdin:
        reported = [hashlib.sha256(held).hexdigest()]
        for pipe in pipes:
            pipe.send(True)
            reported.append(pipe.recv())
        print(" ".join(reported), flush=True)  # noqa: T201  # as above


if __name__ == "__main__":
    main()
