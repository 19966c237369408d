"""Load runs in threads, reporting to the loop as events."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from services.loader.adapters.reader import FilesReader, ReadOptions, ReadStats
from services.loader.adapters.shm import free_bytes, no_room
from services.loader.devices.copies import Copies
from services.loader.domain.events import Completed, Ended, Event, Failed, Fetched, Indexed, Laid, Progressed, StartRun
from services.loader.domain.links import Order
from services.loader.format.checkpoint import Checkpoint
from services.loader.format.segment import Layout, lay_out
from services.loader.pipeline.fill import Filling, PieceReader
from services.loader.pipeline.link import Link
from services.loader.pipeline.pieces import cut
from services.loader.pipeline.remote import TierReader
from services.loader.pool.memory import PoolMemory
from services.loader.pool.region import Region
from services.loader.tiers.port import Cancelled, Tier
from services.loader.tiers.sources import Sources
from shared.contracts.loader import LinkStatus
from shared.contracts.models import ModelCard
from shared.contracts.phases import Phase
from shared.errors import CheckpointInvalid, ThawError
from shared.telemetry.timeline import Timeline
from shared.telemetry.tracing import context_of, record_phases

log = logging.getLogger(__name__)
REPORT_INTERVAL_S = 0.02
_AT_ONCE = 16
_SPEEDS_KEPT = 8


@dataclass(frozen=True)
class Threads:
    """That read from each disk, and from each remote host."""

    disk: int = 4
    remote: int = 8


@dataclass
class Run:
    """A load run. `cancelled` ends it within a piece's time; `wake`: opened, granted or cancelled."""

    order: StartRun
    timeline: Timeline = field(default_factory=lambda: Timeline("loader"))
    cancelled: threading.Event = field(default_factory=threading.Event)
    wake: threading.Event = field(default_factory=threading.Event)
    granted: Future[tuple[int, ...]] = field(default_factory=Future)
    filling: Filling | None = None
    tier: Tier | None = None
    region: Region | None = None
    background: bool = False
    is_past: bool = False
    loaded: int = 0
    reported: float = 0.0
    lock: threading.Lock = field(default_factory=threading.Lock)


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
    ) -> None:
        """`copies`: brings what arrives to devices; None where there are none but the CPU."""
        self.copies = copies
        self._pool, self._sources, self._emit = pool, sources, emit
        self._thread_counts, self._order = threads, order
        self._runs: dict[int, Run] = {}
        self._links: dict[str, Link] = {}
        self._links_lock = threading.Lock()
        self._speeds: list[tuple[int, float]] = []
        self._loads = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="load")

    @property
    def bytes_per_second(self) -> float | None:
        """Over the latest loads together."""
        seconds = sum(s for _, s in self._speeds)
        return sum(b for b, _ in self._speeds) / seconds if seconds > 0 else None

    def speed_of(self, link: str) -> float | None:
        """Bytes per second that a link was measured at."""
        found = self._links.get(link)
        return found.status().bytes_per_second if found else None

    def links(self) -> tuple[LinkStatus, ...]:
        own = tuple(link.status() for link in list(self._links.values()))
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
        run = self._runs[order.run] = Run(order, background=order.background)
        self._loads.submit(self._guarded, run)

    def cancel(self, run: int) -> None:
        if (found := self._runs.get(run)) is not None:
            found.cancelled.set()
            found.wake.set()

    def hurry(self, run: int) -> None:
        if (found := self._runs.get(run)) is not None:
            found.background = False
            if found.filling is not None:
                found.filling.hurry()
            if self.copies is not None:
                self.copies.hurry(run)

    def grant(self, run: int, chunks: tuple[int, ...] | None) -> None:
        """Chunks for a run that waits for them; None: there are none for it."""
        if (found := self._runs.get(run)) is not None and not found.granted.done():
            if chunks is None:
                found.granted.set_exception(_Denied())
            else:
                found.granted.set_result(chunks)
            found.wake.set()

    def forget(self, run: int) -> Callable[[], int]:
        """The run's weights leave. Before its memory is given to others, what is returned must be called: it ends the copies to the SSD cache
        and to devices that may still be made from there, and may take a moment. It tells how many bytes devices got back."""
        found = self._runs.pop(run, None)
        bring_back = self.copies.forget(run) if self.copies is not None else None

        def end() -> int:
            if found is not None:
                _close(found)
            return bring_back() if bring_back is not None else 0

        return end

    def close(self) -> None:
        """Call off what runs, and wait for it."""
        for run in list(self._runs):
            self.cancel(run)
        self._loads.shutdown(cancel_futures=True)
        for link in self._links.values():
            link.close()
        for found in list(self._runs.values()):
            _close(found)
        if self.copies is not None:
            self.copies.shut_down()

    def _guarded(self, run: Run) -> None:
        order = run.order
        try:
            total, seconds = self._load(run)
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
        self._settle(run)
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
        self._emit(Completed(order.weights_id, order.run))

    def _settle(self, run: Run) -> None:
        """Close the tier when its copy to the disk is done, and unmap again what was read for that."""
        run.filling, tier = None, run.tier
        if tier is None or tier.settled().is_set():
            _close(run)
            return

        def wait() -> None:
            tier.settled().wait()
            _close(run)
            if run.region is not None and run.order.run in self._runs:
                run.region.zap_all()

        threading.Thread(target=wait, name="settle", daemon=True).start()

    def _over(self, run: Run, event: Ended | Failed) -> None:
        self._runs.pop(run.order.run, None)
        _close(run)
        self._emit(event)

    def _failed(self, run: Run, error: ThawError) -> None:
        log.warning("a load failed", extra={"model": run.order.card.name, "code": error.code, "error": error.message})
        self._over(run, Failed(run.order.weights_id, run.order.run, error.body()))

    def _load(self, run: Run) -> tuple[int, float]:
        """Bytes loaded, and the seconds that reading them took."""
        order, card = run.order, run.order.card
        began = time.monotonic()
        tier, directory, checkpoint = self._opened(run)
        run.tier = tier
        phase = Phase.FETCH if tier.directory is None else Phase.LOAD
        stats, seconds = ReadStats(), 0.0
        try:
            layout = lay_out(checkpoint, order.weights_id)
            _check_size(card, layout)
            region = run.region = Region(self._pool, self._chunks(run, layout.total_bytes), layout.total_bytes)
            reading = time.monotonic()
            self._fill(run, layout, region, directory, stats)
            tier.finish(run.cancelled)
            seconds = time.monotonic() - reading
        finally:
            run.timeline.add(phase, began, time.monotonic(), **_detail(run, stats, seconds))
        return layout.total_bytes, seconds

    def _chunks(self, run: Run, nbytes: int) -> tuple[int, ...]:
        """Chunks for `nbytes`, as the loop decides: it may have others leave first."""
        run.wake.clear()
        self._emit(Laid(run.order.weights_id, run.order.run, nbytes, free_bytes()))
        if not run.cancelled.is_set():
            run.wake.wait()
        if run.cancelled.is_set():
            raise Cancelled
        try:
            return run.granted.result()
        except _Denied:
            raise no_room(nbytes) from None

    def _fill(self, run: Run, layout: Layout, region: Region, directory: Path, stats: ReadStats) -> None:
        order = run.order

        def on_loaded(watermark: int) -> None:
            run.loaded = watermark
            if self._due(run):
                self._emit(Progressed(order.weights_id, order.run, watermark))
                if run.tier is not None and run.tier.directory is None:
                    self._emit(Fetched(order.weights_id, order.run, watermark))

        pieces = cut(layout)
        on_arrived: Callable[[int, int], None] | None = None
        if self.copies is not None:
            self.copies.begin(order.run, region)
            on_arrived = partial(self.copies.arrived, order.run)
        run.filling = Filling(
            layout,
            region,
            pieces,
            background=run.background,
            cancelled=run.cancelled,
            on_loaded=on_loaded,
            on_arrived=on_arrived,
        )
        run.filling.write_head()
        self._emit(Indexed(order.weights_id, order.run, str(directory), layout.total_bytes))
        on_loaded(run.filling.loaded)
        tier = run.tier
        assert tier is not None
        reader: PieceReader
        if tier.directory is None:
            reader, threads = TierReader(tier, layout.places, region, run.cancelled), self._thread_counts.remote
        else:
            threads = self._thread_counts.disk
            reader = FilesReader(layout.places, pieces, region, ReadOptions(threads=threads))
        try:
            run.filling.run(reader, self._link(tier.link, threads))
        finally:
            stats.add(reader.stats)

    def _link(self, name: str, threads: int) -> Link:
        with self._links_lock:
            if name not in self._links:
                self._links[name] = Link(name, threads, self._order)
            return self._links[name]

    def _opened(self, run: Run) -> tuple[Tier, Path, Checkpoint]:
        """The nearest place that has the model, and its checked headers. A host that hangs is left to itself when the run is called off."""
        card = run.order.card
        found: Future[tuple[Tier, Path, Checkpoint]] = Future()

        def work() -> None:
            tier: Tier | None = None
            try:
                tier = self._sources.open(card.info.source, card.info.revision, pinned=card.spec.pin)
                found.set_result((tier, *self._sources.checkpoint(tier, trust_remote_code=card.spec.trust_remote_code)))
            except BaseException as e:
                found.set_exception(e)
                if tier is not None:
                    tier.close()
            run.wake.set()
            if run.cancelled.is_set() and tier is not None:
                tier.close()

        threading.Thread(target=work, name="open", daemon=True).start()
        run.wake.wait()
        if run.cancelled.is_set():
            if found.done() and found.exception() is None:
                found.result()[0].close()
            raise Cancelled
        return found.result()

    def _due(self, run: Run) -> bool:
        """Whether progress may be told again: not for every chunk."""
        now = time.monotonic()
        with run.lock:
            if now - run.reported < REPORT_INTERVAL_S:
                return False
            run.reported = now
            return True


class _Denied(Exception):
    """The loop has no chunks for the run."""


def _close(run: Run) -> None:
    if run.tier is not None:
        run.tier.close()


def _check_size(card: ModelCard, layout: Layout) -> None:
    """Memory was reserved by what the registration said: a checkpoint that has grown or shrunk since must be registered again."""
    if layout.total_bytes != card.info.weights_bytes:
        raise CheckpointInvalid(
            f"the weight files of {card.name} have changed since it was registered ({layout.total_bytes} bytes instead of "
            f"{card.info.weights_bytes}); register it again (thaw models add)"
        )


def _detail(run: Run, stats: ReadStats, seconds: float) -> dict[str, str | int | float]:
    if not seconds:
        return {"loaded_bytes": run.loaded}
    total = stats.direct + stats.cached + stats.buffered + stats.remote
    return {
        "bytes": run.loaded,
        "gb_per_s": round(total / max(seconds, 1e-9) / 1e9, 3),
        "direct_bytes": stats.direct,
        "cached_bytes": stats.cached,
    }
