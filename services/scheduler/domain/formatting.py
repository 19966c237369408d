"""Numbers for people."""

from __future__ import annotations


def gib(count: int) -> str:
    """Bytes in GiB or MiB."""
    mib = count / 2**20
    return f"{mib / 1024:.2f} GiB" if mib >= 1024 else f"{mib:.0f} MiB"
