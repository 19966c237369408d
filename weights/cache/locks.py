"""Lock files between the loaders of one machine.

The kernel releases a lock when its process exits.
"""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path
from typing import Self

_POLL_S = 0.02
"""Poll interval: a bounded wait has no event for a released lock."""


class FileLock:
    """A lock held from `take` until `release`."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    @classmethod
    def take(cls, path: Path, *, shared: bool = False, within_s: float = 0.0) -> FileLock | None:
        """Take the lock; None if another process holds it for `within_s` seconds.

        Raises `OSError`.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        deadline = time.monotonic() + within_s
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            while not _try_lock(fd, shared=shared):
                if time.monotonic() >= deadline:
                    os.close(fd)
                    return None
                time.sleep(_POLL_S)
        except BaseException:
            os.close(fd)
            raise
        return cls(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _try_lock(fd: int, *, shared: bool) -> bool:
    try:
        fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
