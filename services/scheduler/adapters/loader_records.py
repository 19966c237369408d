"""The loaders' status in the database, written as it changes (`adapters/statistics.py`)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

from services.scheduler.adapters.statistics import persisted_part
from services.scheduler.domain.state.volatile import LoaderPresence

AT_ONCE = 100
"""Loaders written in one transaction."""


class Database(Protocol):
    async def keep_loaders(self, epoch: int, loaders: Iterable[LoaderPresence]) -> None:
        """Replace the stored status of these loaders' nodes."""


class LoaderRecords:
    """The statuses of loaders that one term has written."""

    def __init__(self, database: Database, epoch: int) -> None:
        self._database = database
        self._epoch = epoch
        self._written: dict[str, tuple[object, ...]] = {}

    async def write_changes(self, loaders: Mapping[str, LoaderPresence]) -> None:
        """Write the status of loaders that has changed since it was written.

        Of nodes that are gone nothing is kept: the database forgets them too.

        Raises:
            StaleEpoch: Another leader was elected.
            SQLAlchemyError: The database failed. The next call writes what is left.
        """
        known = {name: (loader, persisted_part(loader)) for name, loader in loaders.items()}
        for gone in self._written.keys() - known.keys():
            del self._written[gone]
        changed = [name for name, (_, part) in known.items() if self._written.get(name) != part]
        for at in range(0, len(changed), AT_ONCE):
            some = changed[at : at + AT_ONCE]
            await self._database.keep_loaders(self._epoch, [known[name][0] for name in some])
            self._written |= {name: known[name][1] for name in some}
