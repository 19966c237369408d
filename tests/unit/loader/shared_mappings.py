"""Mappings of shared memory in this process."""

from __future__ import annotations

from pathlib import Path

from weights.pool.shm import SHM

_UNNAMED = f"{SHM}/#"


def mappings() -> int:
    """Return mappings of unnamed shared memory in this process."""
    return sum(_UNNAMED in line for line in _list_shared())


def named_mappings() -> set[str]:
    """Return the files of shared memory that this process maps, and that have a name.

    Other processes may create files there at any time.
    """
    return {line.split(maxsplit=5)[5] for line in _list_shared() if _UNNAMED not in line}


def _list_shared() -> list[str]:
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if f"{SHM}/" in line]
