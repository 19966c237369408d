"""Removes pools of loaders that do not start again under their state directory."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import time
from pathlib import Path

from weights.pool import shm

log = logging.getLogger(__name__)
POOLS = ("thaw-????????-pool", "thaw-????????-pages-*", "thaw-????????-left-*")
SWEPT_AFTER_S = 600.0
"""Age of a pool since its last change: a loader that adopts it may be about to start."""


def sweep(after_s: float = SWEPT_AFTER_S) -> list[str]:
    """Remove abandoned pools; blocks.

    No loader locks such a pool, no process maps it, and it has not changed for `after_s` seconds.

    Returns:
        Names of the removed pools.
    """
    removed = []
    for path in (p for pattern in POOLS for p in shm.SHM.glob(pattern)):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime >= after_s and _remove_unlocked(path):
                removed.append(path.name)
    if removed:
        log.info("removed pools of loaders that are gone", extra={"pools": removed})
    return removed


def _remove_unlocked(path: Path) -> bool:
    """Raises `OSError` where a loader holds its lock."""
    fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if _is_mapped(path):
            return False
        path.unlink()
        return True
    finally:
        os.close(fd)


def _is_mapped(path: Path) -> bool:
    """True if an engine still computes with weights in it."""
    wanted = os.fsencode(path)
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            with contextlib.suppress(OSError):
                if wanted in (process / "maps").read_bytes():
                    return True
    return False
