"""Speeds that a migrator has learned from earlier migrations, for the next one."""

from __future__ import annotations

from services.migrator.domain.rounds import UNKNOWN_LINK, Speed
from shared.contracts.migration import MigrationRecord

SPEEDS_KEPT = 1_000
"""Maximum number of each kind; the one that was learned the longest ago is dropped."""


class LearnedSpeeds:
    """Costs of recomputing by model and node, and of sending by source node and destination node.

    A pair of nodes has a speed of its own: a slow path does not make others look slow.
    """

    def __init__(self) -> None:
        self._recompute: dict[tuple[str, str], Speed] = {}
        self._links: dict[tuple[str, str], Speed] = {}

    def recompute(self, record: MigrationRecord) -> Speed:
        """Return milliseconds per token of the migration's model on its destination."""
        return self._recompute.get((record.model, record.node), Speed())

    def link(self, record: MigrationRecord) -> Speed:
        """Return milliseconds per KiB between the migration's nodes."""
        return self._links.get((record.source_node, record.node), UNKNOWN_LINK)

    def keep(self, record: MigrationRecord, recompute: Speed, link: Speed) -> None:
        """Keep what a migration has learned."""
        _keep(self._recompute, (record.model, record.node), recompute)
        _keep(self._links, (record.source_node, record.node), link)


def _keep(speeds: dict[tuple[str, str], Speed], key: tuple[str, str], speed: Speed) -> None:
    speeds.pop(key, None)
    speeds[key] = speed
    while len(speeds) > SPEEDS_KEPT:
        del speeds[next(iter(speeds))]
