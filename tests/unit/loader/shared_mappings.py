"""Mappings of shared memory in this process."""

from __future__ import annotations

from pathlib import Path

from weights.pool.shm import SHM


def mappings() -> int:
    """Return mappings of unnamed shared memory in this process."""
    return sum(f"{SHM}/#" in line for line in Path("/proc/self/maps").read_text().splitlines())
