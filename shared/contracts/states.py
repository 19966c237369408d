"""Define the states that messages name.

The command line reads them without importing pydantic.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Literal


class InstanceState(StrEnum):
    PREPARING = "preparing"
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    SUSPENDED = "suspended"
    ASLEEP = "asleep"
    RESUMING = "resuming"
    STOPPED = "stopped"
    FAILED = "failed"

    @property
    def holds_memory(self) -> bool:
        """True if the instance's memory on its device is reserved.

        A failed instance counts until its process is proved gone.
        """
        return self not in _WITHOUT_MEMORY

    @property
    def parked(self) -> bool:
        """True if the engine's process is alive without its memory.

        `InstanceMemory.reserved` is the memory it has left.
        """
        return self in _PARKED

    @property
    def starting(self) -> bool:
        return self in _STARTING


# Made once: a decision asks some dozen times.
_PARKED = frozenset((InstanceState.SUSPENDED, InstanceState.ASLEEP))
_STARTING = frozenset((InstanceState.PREPARING, InstanceState.LOADING, InstanceState.RESUMING))
_WITHOUT_MEMORY = frozenset((*_PARKED, InstanceState.STOPPED, InstanceState.FAILED))

MigrationState = Literal["asked", "preparing", "handing_over", "done", "given_up", "failed", "cancelled"]
"""asked: not claimed yet. preparing: rounds at the destination, the source continues. handing_over:
gateways swap routes. given_up: it would not have converged, or nothing was left to move; unharmed.
failed: a request could not be moved; it runs on where it can.
"""
FINAL: tuple[MigrationState, ...] = ("done", "given_up", "failed", "cancelled")
