"""Entries of a loader's caches."""

from __future__ import annotations

from collections.abc import Callable

from shared.contracts.loader import LoaderStatus


def holds(tier: str, name: str = "likely") -> Callable[[LoaderStatus], bool]:
    return lambda s: any(c.tier == tier and (c.source or "").endswith(name) for c in s.cached)
