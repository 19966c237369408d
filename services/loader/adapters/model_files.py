"""The directory of a model's files on this node, for engines that read them themselves."""

from __future__ import annotations

import asyncio
from pathlib import Path

from services.loader.adapters.disk_copies import DiskCopies
from shared.contracts.models import ModelCard
from shared.errors import Unavailable
from weights.sources.open import is_remote
from weights.sources.sources import Sources


class ModelFiles:
    """Directories of local models, and copies of remote ones in the SSD cache."""

    def __init__(self, sources: Sources, copies: DiskCopies) -> None:
        self._sources, self._copies = sources, copies

    async def fetch(self, card: ModelCard) -> Path:
        """Return the directory with all files of the model. A copy may be evicted afterwards.

        Raises:
            CheckpointInvalid: The files have changed since the model was registered.
            StoreFull: The SSD cache has no room for a copy.
            Unavailable: The source cannot be reached.
        """
        await self._copies.check_room(card)
        await self._copies.write(card)
        return await asyncio.to_thread(self._locate, card)

    def _locate(self, card: ModelCard) -> Path:
        info = card.info
        if not is_remote(info.source):
            tier = self._sources.open(info.source, info.revision)
            try:
                directory, _ = self._sources.checkpoint(tier, trust_remote_code=False, registered=info.revision)
                return directory
            finally:
                tier.close()
        with self._sources.open_complete(info.revision) as found:
            if found is None:
                raise Unavailable(f"The copy of {card.name} was evicted from the disk cache. Try again")
            return found[0]
