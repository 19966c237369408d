"""Borrowers of pages whose process has exited."""

from __future__ import annotations

from tests.unit.loader.store.separate_devices import COUNT
from weights.store.lending import Borrower

BORROWER = [0]
"""A process that has exited: what it has borrowed can be taken back."""


def borrower(floor: int, ceiling: int = COUNT) -> Borrower:
    return Borrower(floor, pid=BORROWER[0], ceiling=ceiling)
