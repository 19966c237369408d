"""Since when the scheduler's own connection to NATS works: without it, all others seem silent."""

from __future__ import annotations

from services.scheduler.adapters import clock
from shared.messaging import Mesh

PROBE_WITHIN_S = 2
"""A connection on which NATS does not answer within this time is opened again."""


class Connection:
    """The connection of one term."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._reconnections = mesh.reconnections
        self._since: float | None = clock.now()

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
            self._since = clock.now()
        self._reconnections = self._mesh.reconnections
        return self._since
