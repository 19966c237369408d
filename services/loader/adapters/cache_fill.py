"""Complete the SSD cache's entry of a model after a partial load (ADR 0058).

A partial load keeps the ranges that it reads. `CacheFill` then fetches the rest: one model and one
read at a time, after the reads of all loads on the same link. A new load of the model cancels the
fetching, and continues the entry itself. If another loader of this machine fetches the model, this
one waits for it while the next models are fetched, and queues the model again if the other one has
given up.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from shared.contracts.models import ModelCard
from shared.errors import ThawError
from weights.cache.caching import CachingTier
from weights.sources.sources import Sources
from weights.transfer.link import Link, Transfer
from weights.transfer.links import Links
from weights.transfer.pieces import Piece

log = logging.getLogger(__name__)
_MOST_WAITING = 8
"""Models for which another loader is waited for at a time."""


class _Fill:
    """The fetching of one model. Its reads are background transfers of the link."""

    def __init__(self, card: ModelCard) -> None:
        self.card = card
        self.done: Future[bool] = Future()
        self.cancelled = threading.Event()
        self.gives_way = False
        """True: it is cancelled because a load of the model continues it."""
        self.tier: CachingTier | None = None
        """The open tier; None: the model waits in a queue, or has ended."""
        self._lock = threading.Lock()
        self._waiting: tuple[Link, Transfer] | None = None

    def read_in_turn(self, link: Link, nbytes: int, read: Callable[[], None]) -> None:
        piece, name = Piece(0, 0, 0, nbytes, 0), self.card.name
        transfer = Transfer((piece,), lambda _: read(), background=True, cancelled=self.cancelled, model=name)
        with self._lock:
            link.submit(transfer)
            self._waiting = link, transfer
        if self.cancelled.is_set():
            link.raise_priority(transfer)
        transfer.result()

    def cancel(self) -> None:
        """Cancel the fetching. A read that waits in the link's queue ends without reading."""
        self.cancelled.set()
        with self._lock:
            if self._waiting is not None:
                link, transfer = self._waiting
                link.raise_priority(transfer)


class CacheFill:
    """The models to complete, in the order of their loads. Thread-safe."""

    def __init__(self, sources: Sources, links: Links, threads: int) -> None:
        """Create it without models.

        Args:
            sources: Sources of models.
            links: Links that fetches share with loads.
            threads: Number of threads of a link to a remote host.
        """
        self._sources, self._links, self._link_threads = sources, links, threads
        self._lock = threading.Lock()
        self._fills: dict[str, _Fill] = {}
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="cache-fill")
        self._waits = ThreadPoolExecutor(_MOST_WAITING, thread_name_prefix="cache-wait")
        self._is_closed = False

    def begin(self, card: ModelCard) -> Future[bool]:
        """Fetch the missing ranges of the model, unless they are being fetched.

        The result follows when that has ended, well or not: True if a load of the model continues
        it.
        """
        with self._lock:
            fill = self._fills.get(card.info.revision)
            if fill is not None and not fill.cancelled.is_set():
                return fill.done
            fill = self._fills[card.info.revision] = _Fill(card)
        self._submit(self._pool, self._run, fill)
        return fill.done

    def cancel(self, weights_id: str) -> None:
        """Cancel the fetching of a model, which nothing wants any more."""
        with self._lock:
            fill = self._fills.get(weights_id)
        if fill is not None:
            fill.cancel()

    def give_way(self, weights_id: str) -> None:
        """Cancel the fetching of a model, because a load of it begins."""
        with self._lock:
            fill = self._fills.get(weights_id)
        if fill is not None:
            fill.gives_way = True
            fill.cancel()

    def count_bytes(self, weights_id: str) -> tuple[int, int] | None:
        """Return the bytes on the disk and in all of a model that is being fetched, else None."""
        with self._lock:
            fill = self._fills.get(weights_id)
        tier = fill.tier if fill is not None else None
        return tier.count_cached_bytes() if tier is not None else None

    def close(self) -> None:
        """Cancel all. The links are still open."""
        with self._lock:
            self._is_closed = True
            fills = list(self._fills.values())
        for fill in fills:
            fill.cancel()
        for pool in (self._waits, self._pool):
            pool.shutdown(cancel_futures=True)
        for fill in fills:  # those that the shutdown has taken out of a queue did not run
            self._settle(fill)

    def _submit(self, pool: ThreadPoolExecutor, work: Callable[[_Fill], None], fill: _Fill) -> None:
        with self._lock:
            if not self._is_closed:
                pool.submit(work, fill)
                return
        self._settle(fill)

    def _run(self, fill: _Fill) -> None:
        """Fetch a model, or have it wait for another loader."""
        if self._attempt(fill, self._complete):
            self._submit(self._waits, self._wait, fill)
        else:
            self._settle(fill)

    def _wait(self, fill: _Fill) -> None:
        """Wait for another loader, and queue the model again if it has given up."""
        if self._attempt(fill, self._wait_for_other_loader):
            self._submit(self._pool, self._run, fill)
        else:
            self._settle(fill)

    def _attempt(self, fill: _Fill, step: Callable[[_Fill, CachingTier], bool]) -> bool:
        """Open the model and take a step. True: another step follows."""
        card = fill.card
        try:
            if fill.cancelled.is_set():
                return False
            tier = self._sources.open(card.info.source, card.info.revision, pinned=card.spec.pin)
            try:
                if not isinstance(tier, CachingTier):
                    return False
                fill.tier = tier
                return step(fill, tier) and not fill.cancelled.is_set()
            finally:
                fill.tier = None
                tier.close()
        except ThawError as e:
            log.info("failed to complete a model in the SSD cache", extra={"model": card.name, "reason": e.message})
        except Exception:  # the thread's boundary
            log.exception("failed to complete a model in the SSD cache", extra={"model": card.name})
        return False

    def _settle(self, fill: _Fill) -> None:
        with self._lock:
            if self._fills.get(fill.card.info.revision) is fill:
                del self._fills[fill.card.info.revision]
            if not fill.done.done():
                fill.done.set_result(fill.gives_way)

    def _complete(self, fill: _Fill, tier: CachingTier) -> bool:
        """Fetch what the cache lacks. True: another loader fetches the model."""
        if tier.is_following:
            return True
        if tier.caches:
            link = self._links.get(tier.link, self._link_threads)
            tier.complete(lambda nbytes, read: fill.read_in_turn(link, nbytes, read), fill.cancelled)
            tier.get_settled_event().wait()
        return False

    def _wait_for_other_loader(self, fill: _Fill, tier: CachingTier) -> bool:
        """True: the other loader has given up."""
        tier.wait_for_other_process(fill.cancelled)
        return tier.caches
