"""Load runs in threads, which report to the loop as events."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from services.loader.adapters.arrivals import Arrivals
from services.loader.adapters.cache_fill import CacheFill
from services.loader.adapters.device_copies import Copies
from services.loader.adapters.progress import Progress
from services.loader.adapters.resident import ResidentFiles
from services.loader.adapters.run import Run, RunContext, Threads
from services.loader.domain.effects import StartRun
from services.loader.domain.events import Completed, Ended, Event, Failed
from shared.contracts.loader import LinkStatus
from shared.contracts.models import ModelCard
from shared.errors import ThawError
from shared.telemetry.timeline import Timeline
from shared.telemetry.tracing import context_of, record_phases
from weights.pool.memory import PoolMemory
from weights.sources.open import is_remote
from weights.sources.sources import Sources
from weights.tiers.port import Cancelled
from weights.transfer.link_queue import Order
from weights.transfer.links import Links

log = logging.getLogger(__name__)
LOADS_AT_ONCE = 256
"""Loads at once. Most of them wait: for their source, for memory, or for a link, whose threads read
for all.
"""
_SPEEDS_KEPT = 8


class Runs:
    """All load runs."""

    def __init__(
        self,
        pool: PoolMemory,
        sources: Sources,
        emit: Callable[[Event], None],
        threads: Threads,
        order: Order = "fair",
        copies: Copies | None = None,
        *,
        verify: bool = False,
        free_memory: Callable[[], None] = lambda: None,
    ) -> None:
        """Start the threads.

        Args:
            emit: Passes an event to the loop; called from the runs' threads.
            copies: Copies loaded bytes to devices; None on a node without GPUs.
            verify: Compare the hashes of a converted checkpoint before a load is complete.
            free_memory: Called in a run's thread before it measures free memory; it may block.
        """
        self.copies = copies
        self._context = RunContext(pool, sources, emit, threads, Links(order), Progress(emit), copies, verify, free_memory)
        self._fill = CacheFill(sources, self._context.links, threads.remote)
        self._runs: dict[int, Run] = {}
        self._lock = threading.Lock()
        self.read_bytes = 0
        """Bytes that ended runs have read from disks and remote sources."""
        self._speeds: list[tuple[int, float]] = []
        self._loads = ThreadPoolExecutor(LOADS_AT_ONCE, thread_name_prefix="load")

    @property
    def bytes_per_second(self) -> float | None:
        """Mean over the latest loads."""
        seconds = sum(s for _, s in self._speeds)
        return sum(b for b, _ in self._speeds) / seconds if seconds > 0 else None

    def speed_of(self, link: str) -> float | None:
        """Return the measured bandwidth of a link in bytes per second."""
        return self._context.links.speed_of(link)

    def links(self) -> tuple[LinkStatus, ...]:
        own = self._context.links.statuses()
        return own if self.copies is None else (*own, *self.copies.links())

    def timeline(self, run: int) -> Timeline | None:
        """Return the phases of a run that the present start waited for.

        None for cached or adopted weights.
        """
        found = self._runs.get(run)
        return found.timeline if found and not found.is_reused else None

    def arrivals(self, run: int) -> Arrivals | None:
        """Return what the run has loaded into host memory; None for adopted weights."""
        found = self._runs.get(run)
        return found.arrivals if found is not None else None

    def find_resident(self, revision: str) -> ResidentFiles | None:
        """Return the weight files of a remote model that a run has loaded into host memory.

        None for adopted weights. Any thread may call this.
        """
        of_revision = (r for r in list(self._runs.values()) if r.order.weights_id == revision)
        return next((r.resident for r in of_revision if r.resident is not None), None)

    def mark_reused(self, run: int) -> None:
        """Drop the run's phases: instances that attach from now on did not wait for it."""
        if (found := self._runs.get(run)) is not None:
            found.is_reused = True

    def start(self, order: StartRun) -> None:
        self._fill.give_way(order.weights_id)
        run = self._runs[order.run] = Run(order, self._context, background=order.background)
        self._loads.submit(self._run_guarded, run)

    def cancel(self, run: int) -> None:
        if (found := self._runs.get(run)) is not None:
            found.call_off()
            if self.copies is not None:
                self.copies.wake()

    def raise_priority(self, run: int) -> None:
        if (found := self._runs.get(run)) is not None:
            found.raise_priority()
            if self.copies is not None:
                self.copies.raise_priority(run)

    def grant(self, run: int, chunks: tuple[int, ...] | None, device: str | None = None) -> None:
        """Give chunks to a waiting run; None: it gets none.

        Args:
            device: The run reads only what this device lacks.
        """
        if (found := self._runs.get(run)) is not None:
            found.grant(chunks, device)

    def wait_until_settled(self, weights_id: str) -> None:
        """Wait until these weights are written to the SSD cache, or will not be. Blocks."""
        for run in [r for r in list(self._runs.values()) if r.order.weights_id == weights_id]:
            run.opened.wait()
            if run.tier is not None:
                run.tier.get_settled_event().wait()

    def complete_on_disk(self, card: ModelCard) -> Future[bool]:
        """Fetch what the SSD cache lacks of a remote model, without a load of it.

        The result follows when that has ended, well or not: True if a load continues it.
        """
        return self._fill.begin(card)

    def cancel_on_disk(self, weights_id: str) -> None:
        self._fill.cancel(weights_id)

    def count_disk_bytes(self, weights_id: str) -> tuple[int, int] | None:
        """Return the bytes on the disk and in all of a model that is fetched without a load."""
        return self._fill.count_bytes(weights_id)

    def remove(self, run: int) -> Callable[[], int]:
        """Remove the run.

        Returns:
            A function that ends the copies from the run's memory to the SSD cache and to devices,
            and returns the device bytes released. It may block for a moment. Call it before the
            run's chunks are reused.
        """
        found = self._runs.pop(run, None)
        if found is not None:
            found.is_removed = True
        release_copies = self.copies.remove(run) if self.copies is not None else None

        def end() -> int:
            if found is not None:
                found.close()
            return release_copies() if release_copies is not None else 0

        return end

    def close(self) -> None:
        """Cancel all runs and wait for them."""
        for run in list(self._runs):
            self.cancel(run)
        self._loads.shutdown(cancel_futures=True)
        self._fill.close()
        self._context.links.close()
        self._context.progress.close()
        for found in list(self._runs.values()):
            found.close()
        if self.copies is not None:
            self.copies.shut_down()

    def _run_guarded(self, run: Run) -> None:
        order = run.order
        try:
            total, seconds = run.load()
        except Cancelled:
            self._end_run(run, Ended(order.weights_id, order.run))
            return
        except ThawError as e:
            self._fail_run(run, e)
            return
        except Exception as e:  # the thread's boundary: waiters need an answer
            log.exception("load failed unexpectedly", extra={"model": order.card.name})
            self._fail_run(run, ThawError(f"{type(e).__name__} while loading {order.card.name}: {e}"))
            return
        finally:
            run.opened.set()
            with self._lock:
                self.read_bytes += run.read_bytes
            record_phases(run.timeline.spans(), context_of(order.traceparent))
        if total:
            self._speeds = [*self._speeds, (total, seconds)][-_SPEEDS_KEPT:]
        log.info(
            "loaded",
            extra={
                "model": order.card.name,
                "bytes": total,
                "seconds": round(seconds, 3),
                "gb_per_s": round(total / max(seconds, 1e-9) / 1e9, 2),
            },
        )
        self._context.emit(Completed(order.weights_id, order.run, run.kept_bytes))
        self._settle(run)
        if run.kept_bytes is not None and is_remote(order.card.info.source):
            self._fill.begin(order.card)

    def _settle(self, run: Run) -> None:
        """Close the tier after its copy to the disk, and unmap the loaded bytes.

        Only readers map them from then on. The function runs in the background.
        """
        run.filling, tier = None, run.tier
        assert tier is not None

        def wait() -> None:
            tier.get_settled_event().wait()
            run.close()
            if run.region is not None and run.order.run in self._runs:
                run.region.zap_all()

        if tier.get_settled_event().is_set():
            wait()
        else:
            threading.Thread(target=wait, name="settle", daemon=True).start()

    def _end_run(self, run: Run, event: Ended | Failed) -> None:
        self._runs.pop(run.order.run, None)
        run.close()
        self._context.emit(event)

    def _fail_run(self, run: Run, error: ThawError) -> None:
        log.warning("load failed", extra={"model": run.order.card.name, "code": error.code, "error": error.message})
        self._end_run(run, Failed(run.order.weights_id, run.order.run, error.body()))
