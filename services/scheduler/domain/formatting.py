"""Numbers as text for people."""

from __future__ import annotations


def gib(count: int) -> str:
    """Format bytes as GiB or MiB."""
    mib = count / 2**20
    return f"{mib / 1024:.2f} GiB" if mib >= 1024 else f"{mib:.0f} MiB"
