"""Complete the SSD cache's entry of a model of which a load has read a part (ADR 0058).

A partial load keeps the ranges that it reads. Afterwards the rest is fetched, one model at a time
and one read at a time, behind the reads of all loads on the same link. A load of the same model
ends this, and continues the same entry.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from services.loader.domain.effects import StartRun
from shared.errors import ThawError
from weights.cache.caching import CachingTier
from weights.sources.sources import Sources
from weights.transfer.link import Link, Transfer
from weights.transfer.links import Links
from weights.transfer.pieces import Piece

log = logging.getLogger(__name__)


class _Fill:
    """One model. Reads take their turn on the link, as background ones."""

    def __init__(self, order: StartRun) -> None:
        self.order = order
        self.cancelled = threading.Event()
        self._lock = threading.Lock()
        self._waiting: tuple[Link, Transfer] | None = None

    def in_turn(self, link: Link, nbytes: int, read: Callable[[], None]) -> None:
        transfer = Transfer((Piece(0, 0, 0, nbytes, 0),), lambda _: read(), background=True, cancelled=self.cancelled)
        with self._lock:
            link.submit(transfer)
            self._waiting = link, transfer
        if self.cancelled.is_set():
            link.raise_priority(transfer)
        transfer.result()

    def cancel(self) -> None:
        """End soon: a read that waits for its turn ends before the next one of a load."""
        self.cancelled.set()
        with self._lock:
            if self._waiting is not None:
                link, transfer = self._waiting
                link.raise_priority(transfer)


class CacheFill:
    """All models to complete, in order of their loads. Methods may be called from any thread."""

    def __init__(self, sources: Sources, links: Links, threads: int) -> None:
        """`threads`: of a link to a remote host."""
        self._sources, self._links, self._link_threads = sources, links, threads
        self._lock = threading.Lock()
        self._fills: dict[str, _Fill] = {}
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="cache-fill")

    def begin(self, order: StartRun) -> None:
        """Fetch what the cache lacks of the model, unless that is under way."""
        with self._lock:
            if order.weights_id in self._fills:
                return
            fill = self._fills[order.weights_id] = _Fill(order)
        self._pool.submit(self._run, fill)

    def cancel(self, weights_id: str) -> None:
        """End the fetching of a model, of which a load begins."""
        with self._lock:
            fill = self._fills.get(weights_id)
        if fill is not None:
            fill.cancel()

    def close(self) -> None:
        """Cancel all. The links are still open."""
        with self._lock:
            fills = list(self._fills.values())
        for fill in fills:
            fill.cancel()
        self._pool.shutdown(cancel_futures=True)

    def _run(self, fill: _Fill) -> None:
        name = fill.order.card.name
        try:
            if not fill.cancelled.is_set():
                self._complete(fill)
        except ThawError as e:
            log.info("failed to complete a model in the SSD cache", extra={"model": name, "reason": e.message})
        except Exception:  # the thread's boundary
            log.exception("failed to complete a model in the SSD cache", extra={"model": name})
        finally:
            with self._lock:
                self._fills.pop(fill.order.weights_id, None)

    def _complete(self, fill: _Fill) -> None:
        card = fill.order.card
        tier = self._sources.open(card.info.source, card.info.revision, pinned=card.spec.pin)
        try:
            if not isinstance(tier, CachingTier) or not tier.caches:
                return
            link = self._links.get(tier.link, self._link_threads)
            tier.complete(lambda nbytes, read: fill.in_turn(link, nbytes, read), fill.cancelled)
            tier.get_settled_event().wait()
        finally:
            tier.close()
