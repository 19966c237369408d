"""Load runs in threads, reporting to the loop as events."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from services.loader.adapters.reader import Cancelled, FilesReader, ReadOptions, ReadStats
from services.loader.adapters.shm import free_bytes, no_room
from services.loader.adapters.source import source_of
from services.loader.domain.events import Completed, Ended, Event, Failed, Fetched, Indexed, Laid, Progressed, StartRun
from services.loader.domain.links import Order
from services.loader.format.checkpoint import open_checkpoint
from services.loader.format.segment import Layout, lay_out
from services.loader.pipeline.fill import Filling
from services.loader.pipeline.link import Link
from services.loader.pipeline.pieces import cut
from services.loader.pool.memory import PoolMemory
from services.loader.pool.region import Region
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


@dataclass
class Run:
    """A load run. `cancelled` ends it within a piece's time; `wake`: fetched, granted or cancelled."""

    order: StartRun
    timeline: Timeline = field(default_factory=lambda: Timeline("loader"))
    cancelled: threading.Event = field(default_factory=threading.Event)
    wake: threading.Event = field(default_factory=threading.Event)
    granted: Future[tuple[int, ...]] = field(default_factory=Future)
    filling: Filling | None = None
    background: bool = False
    fetched: int = 0
    loaded: int = 0
    reported: float = 0.0
    lock: threading.Lock = field(default_factory=threading.Lock)


class Runs:
    """`emit` is called from the threads; the shell brings its events to the loop."""

    def __init__(self, pool: PoolMemory, threads: int, emit: Callable[[Event], None], order: Order = "fair") -> None:
        self._pool, self._threads, self._emit, self._order = pool, threads, emit, order
        self._runs: dict[int, Run] = {}
        self._links: dict[str, Link] = {}
        self._speeds: list[tuple[int, float]] = []
        self._loads = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="load")

    @property
    def bytes_per_second(self) -> float | None:
        """Over the latest loads together."""
        seconds = sum(s for _, s in self._speeds)
        return sum(b for b, _ in self._speeds) / seconds if seconds > 0 else None

    def links(self) -> tuple[LinkStatus, ...]:
        return tuple(link.status() for link in list(self._links.values()))

    def timeline(self, run: int) -> Timeline | None:
        """The phases of a run; None for weights adopted from an earlier loader."""
        found = self._runs.get(run)
        return found.timeline if found else None

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

    def grant(self, run: int, chunks: tuple[int, ...] | None) -> None:
        """Chunks for a run that waits for them; None: there are none for it."""
        if (found := self._runs.get(run)) is not None and not found.granted.done():
            if chunks is None:
                found.granted.set_exception(_Denied())
            else:
                found.granted.set_result(chunks)
            found.wake.set()

    def forget(self, run: int) -> None:
        """The run's weights are gone."""
        self._runs.pop(run, None)

    def close(self) -> None:
        """Call off what runs, and wait for it."""
        for run in list(self._runs):
            self.cancel(run)
        self._loads.shutdown(cancel_futures=True)
        for link in self._links.values():
            link.close()

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
        run.filling = None
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

    def _over(self, run: Run, event: Ended | Failed) -> None:
        self._runs.pop(run.order.run, None)
        self._emit(event)

    def _failed(self, run: Run, error: ThawError) -> None:
        log.warning("a load failed", extra={"model": run.order.card.name, "code": error.code, "error": error.message})
        self._over(run, Failed(run.order.weights_id, run.order.run, error.body()))

    def _load(self, run: Run) -> tuple[int, float]:
        """Bytes loaded, and the seconds that reading them took."""
        order, card = run.order, run.order.card
        began = time.monotonic()
        directory = self._fetch(run)
        if run.fetched:
            run.timeline.add(Phase.FETCH, began, time.monotonic(), bytes=run.fetched)
        run.timeline.begin(Phase.LOAD)
        stats, seconds = ReadStats(), 0.0
        try:
            layout = lay_out(open_checkpoint(directory), order.weights_id)
            _check_size(card, layout)
            region = Region(self._pool, self._chunks(run, layout.total_bytes), layout.total_bytes)
            reading = time.monotonic()
            self._fill(run, layout, region, directory, stats)
            seconds = time.monotonic() - reading
        finally:
            run.timeline.end(Phase.LOAD, **_detail(run, stats, seconds))
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

        pieces = cut(layout)
        run.filling = Filling(layout, region, pieces, background=run.background, cancelled=run.cancelled, on_loaded=on_loaded)
        run.filling.write_head()
        self._emit(Indexed(order.weights_id, order.run, str(directory), layout.total_bytes))
        on_loaded(run.filling.loaded)
        reader = FilesReader(layout.places, pieces, region, ReadOptions(threads=self._threads))
        reader.stats = stats
        run.filling.run(reader, self._link(disk_of(directory), self._threads))

    def _link(self, name: str, threads: int) -> Link:
        with _links_lock:
            if name not in self._links:
                self._links[name] = Link(name, threads, self._order)
            return self._links[name]

    def _fetch(self, run: Run) -> Path:
        """The directory with the model's files. A download that hangs is left to itself when the run is called off."""
        source, trust = source_of(run.order.card.info.source), run.order.card.spec.trust_remote_code
        found: Future[Path] = Future()

        def on_fetched(total: int) -> None:
            run.fetched = total
            if self._due(run):
                self._emit(Fetched(run.order.weights_id, run.order.run, total))

        def work() -> None:
            try:
                found.set_result(source.fetch(on_fetched, run.cancelled, trust_remote_code=trust))
            except BaseException as e:
                found.set_exception(e)
            run.wake.set()

        threading.Thread(target=work, name="fetch", daemon=True).start()
        run.wake.wait()
        if run.cancelled.is_set():
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


_links_lock = threading.Lock()


def disk_of(directory: Path) -> str:
    """The link of the disk that `directory` lies on, by the kernel's name of the whole device."""
    device = directory.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    try:
        node = Path(f"/sys/dev/block/{number}").resolve(strict=True)
    except OSError:  # no block device of its own: tmpfs, overlay, a network's
        return f"ssd:{number}"
    return f"ssd:{node.parent.name if (node / 'partition').exists() else node.name}"


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
    total = stats.direct + stats.cached + stats.buffered
    return {
        "bytes": run.loaded,
        "gb_per_s": round(total / max(seconds, 1e-9) / 1e9, 3),
        "direct_bytes": stats.direct,
        "cached_bytes": stats.cached,
    }
