"""The page cache of a model's files."""

from __future__ import annotations

import os
from pathlib import Path


def evict(directory: Path) -> None:
    """Evict the files from the page cache."""
    for path in directory.iterdir():
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)
