"""Load runs in threads, reporting to the loop as events."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from services.loader.adapters.device_copies import Copies
from services.loader.adapters.progress import Progress
from services.loader.adapters.run import Means, Run, Threads
from services.loader.domain.effects import StartRun
from services.loader.domain.events import Completed, Ended, Event, Failed
from shared.contracts.loader import LinkStatus
from shared.errors import ThawError
from shared.telemetry.timeline import Timeline
from shared.telemetry.tracing import context_of, record_phases
from weights.pool.memory import PoolMemory
from weights.sources.sources import Sources
from weights.tiers.port import Cancelled
from weights.transfer.link_queue import Order
from weights.transfer.links import Links

log = logging.getLogger(__name__)
_AT_ONCE = 16
_SPEEDS_KEPT = 8


class Runs:
    """`emit` is called from the threads; the shell brings its events to the loop."""

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
    ) -> None:
        """`copies`: brings what arrives to devices; None where there are none but the CPU. `verify`: a load is complete when the hashes of a
        converted checkpoint have been compared."""
        self.copies = copies
        self._means = Means(pool, sources, emit, threads, Links(order), Progress(emit), copies, verify)
        self._runs: dict[int, Run] = {}
        self._speeds: list[tuple[int, float]] = []
        self._loads = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="load")

    @property
    def bytes_per_second(self) -> float | None:
        """Over the latest loads together."""
        seconds = sum(s for _, s in self._speeds)
        return sum(b for b, _ in self._speeds) / seconds if seconds > 0 else None

    def speed_of(self, link: str) -> float | None:
        """Bytes per second that a link was measured at."""
        return self._means.links.speed_of(link)

    def links(self) -> tuple[LinkStatus, ...]:
        own = self._means.links.statuses()
        return own if self.copies is None else (*own, *self.copies.links())

    def timeline(self, run: int) -> Timeline | None:
        """The phases of a run that is part of the present start; None for weights that were cached, or adopted from an earlier loader."""
        found = self._runs.get(run)
        return found.timeline if found and not found.is_past else None

    def past(self, run: int) -> None:
        """The run's weights were let go: whoever comes next has not waited for it."""
        if (found := self._runs.get(run)) is not None:
            found.is_past = True

    def start(self, order: StartRun) -> None:
        run = self._runs[order.run] = Run(order, self._means, background=order.background)
        self._loads.submit(self._guarded, run)

    def cancel(self, run: int) -> None:
        if (found := self._runs.get(run)) is not None:
            found.call_off()

    def hurry(self, run: int) -> None:
        if (found := self._runs.get(run)) is not None:
            found.hurry()
            if self.copies is not None:
                self.copies.hurry(run)

    def grant(self, run: int, chunks: tuple[int, ...] | None) -> None:
        """Chunks for a run that waits for them; None: there are none for it."""
        if (found := self._runs.get(run)) is not None:
            found.grant(chunks)

    def settled(self, weights_id: str) -> None:
        """Wait until what was read from afar of these weights is on the disk, or will not be. Blocks."""
        tiers = [r.tier for r in list(self._runs.values()) if r.order.weights_id == weights_id]
        for tier in tiers:
            if tier is not None:
                tier.settled().wait()

    def forget(self, run: int) -> Callable[[], int]:
        """The run's weights leave. Before its memory is given to others, what is returned must be called: it ends the copies to the SSD cache
        and to devices that may still be made from there, and may take a moment. It tells how many bytes devices got back."""
        found = self._runs.pop(run, None)
        bring_back = self.copies.forget(run) if self.copies is not None else None

        def end() -> int:
            if found is not None:
                found.close()
            return bring_back() if bring_back is not None else 0

        return end

    def close(self) -> None:
        """Call off what runs, and wait for it."""
        for run in list(self._runs):
            self.cancel(run)
        self._loads.shutdown(cancel_futures=True)
        self._means.links.close()
        self._means.progress.close()
        for found in list(self._runs.values()):
            found.close()
        if self.copies is not None:
            self.copies.shut_down()

    def _guarded(self, run: Run) -> None:
        order = run.order
        try:
            total, seconds = run.load()
        except Cancelled:
            self._over(run, Ended(order.weights_id, order.run))
            return
        except ThawError as e:
            self._failed(run, e)
            return
        except Exception as e:  # the thread's boundary: whatever it was, waiters must hear of it
            log.exception("a load failed unexpectedly", extra={"model": order.card.name})
            self._failed(run, ThawError(f"{type(e).__name__} while loading {order.card.name}: {e}"))
            return
        finally:
            record_phases(run.timeline.spans(), context_of(order.traceparent))
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
        self._means.emit(Completed(order.weights_id, order.run))
        self._settle(run)

    def _settle(self, run: Run) -> None:
        """When the tier's copy to the disk is done, close it, and unmap what has come: only readers are to map it. Nobody waits for that."""
        run.filling, tier = None, run.tier
        assert tier is not None

        def wait() -> None:
            tier.settled().wait()
            run.close()
            if run.region is not None and run.order.run in self._runs:
                run.region.zap_all()

        if tier.settled().is_set():
            wait()
        else:
            threading.Thread(target=wait, name="settle", daemon=True).start()

    def _over(self, run: Run, event: Ended | Failed) -> None:
        self._runs.pop(run.order.run, None)
        run.close()
        self._means.emit(event)

    def _failed(self, run: Run, error: ThawError) -> None:
        log.warning("a load failed", extra={"model": run.order.card.name, "code": error.code, "error": error.message})
        self._over(run, Failed(run.order.weights_id, run.order.run, error.body()))
