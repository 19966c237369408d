"""Unix sockets below deep directories."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_LONGEST = 100


def lock_path(path: Path) -> Path:
    """The file that the process locks which serves `path`."""
    return path.with_name(path.name + ".lock")


@contextmanager
def short_address(path: Path) -> Iterator[str]:
    """An address to bind or connect to for `path`.

    The kernel takes about 100 bytes: a longer path goes by way of its open directory.
    """
    if len(os.fsencode(path)) <= _LONGEST:
        yield str(path)
        return
    directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{directory}/{path.name}"
    finally:
        os.close(directory)
