"""Copies of remote models on the node's disk, for prefetches."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter

from services.loader.adapters.runs import Runs
from services.loader.adapters.worker_threads import WorkerThreads
from shared.contracts.models import ModelCard
from shared.errors import StoreFull
from weights.sources.open import is_remote
from weights.sources.sources import Sources


class DiskCopies:
    """The SSD cache, filled from loads in progress or from the source."""

    def __init__(self, sources: Sources, runs: Runs) -> None:
        self._sources, self._runs = sources, runs
        self._threads = WorkerThreads("disk-copy")
        self._writers: Counter[str] = Counter()
        """By weights id: calls that wait for one download, which the last one cancels."""

    async def check_room(self, card: ModelCard) -> None:
        """Raise `StoreFull` if the cache has no room for the model even after evictions."""
        if not is_remote(card.info.source) or await asyncio.to_thread(self._is_here, card):
            return
        if not await asyncio.to_thread(self._sources.cache.can_fit, card.info.revision, card.info.weights_bytes):
            raise self._full(card)

    async def write(self, card: ModelCard) -> None:
        """Return when the cache has the model. What its loads have not written is fetched.

        A local directory needs no copy. Raises `StoreFull` if the cache does not have it in the
        end.
        """
        if not is_remote(card.info.source):
            return
        is_continued = True
        while is_continued:
            await self._wait_until_settled(card.info.revision)
            if await asyncio.to_thread(self._is_here, card):
                return
            is_continued = await self._download(card)
        if not await asyncio.to_thread(self._is_here, card):
            raise self._full(card)

    async def _wait_until_settled(self, weights_id: str) -> None:
        """Return when the loads of the weights have written them, or will not.

        That may take as long as a load. The few threads of `asyncio.to_thread` are not blocked
        meanwhile: the loader's status needs them.
        """
        loop, settled = asyncio.get_running_loop(), asyncio.Event()

        def wait() -> None:
            self._runs.wait_until_settled(weights_id)
            with contextlib.suppress(RuntimeError):  # the event loop is closed
                loop.call_soon_threadsafe(settled.set)

        self._threads.run(wait)
        await settled.wait()

    async def _download(self, card: ModelCard) -> bool:
        """Fetch the model. Returns True if a load of it has begun, which continues the download."""
        weights_id = card.info.revision
        self._writers[weights_id] += 1
        try:
            # Cancelling the future itself would cancel it for the other calls, too.
            return await asyncio.shield(asyncio.wrap_future(self._runs.complete_on_disk(card)))
        except asyncio.CancelledError:
            if self._writers[weights_id] == 1:
                self._runs.cancel_on_disk(weights_id)
            raise
        finally:
            self._writers[weights_id] -= 1
            if not self._writers[weights_id]:
                del self._writers[weights_id]

    def count_bytes(self, weights_id: str) -> tuple[int, int] | None:
        """Return the bytes on the disk and in all of weights that are fetched without a load.

        None if they are not, or have not begun.
        """
        return self._runs.count_disk_bytes(weights_id)

    def _is_here(self, card: ModelCard) -> bool:
        with self._sources.open_complete(card.info.revision) as found:
            return found is not None

    def _full(self, card: ModelCard) -> StoreFull:
        return StoreFull(
            f"{card.name} was not kept in the disk cache {self._sources.cache.root}: it has no room, cannot be written, or "
            "another loader fetches the model without progress. Free space on the disk, raise THAW_CACHE_BYTES, or repeat the "
            "request; `thaw logs loader` says more"
        )
