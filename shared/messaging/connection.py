"""Since when a process's own connection to NATS works: without it, all others seem silent."""

from __future__ import annotations

import time
from collections.abc import Callable

from shared.messaging.mesh import Mesh

PROBE_WITHIN_S = 2
"""A connection on which NATS does not answer within this time is opened again."""


class Connection:
    """The connection, from the creation of this object on."""

    def __init__(self, mesh: Mesh, clock: Callable[[], float] = time.monotonic) -> None:
        self._mesh = mesh
        self._clock = clock
        self._reconnections = mesh.reconnections
        self._since: float | None = clock()

    async def find_start(self, *, probe: bool) -> float | None:
        """Return the time since which the connection works; None: it does not.

        Args:
            probe: Ask NATS for an answer: a half-open connection counts as connected for 10 to
                15 s.
        """
        works = await self._mesh.probe(PROBE_WITHIN_S) if probe else self._mesh.is_connected
        if not works:
            self._since = None
        elif self._since is None or self._mesh.reconnections != self._reconnections:
            self._since = self._clock()
        self._reconnections = self._mesh.reconnections
        return self._since
