"""Load runs and removals in threads, reporting to the loop as events."""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from services.loader.adapters.reader import Cancelled, ReadOptions
from services.loader.adapters.shm import await_unmapped, remove_segment
from services.loader.adapters.source import source_of
from services.loader.domain.events import (
    Completed,
    Event,
    Failed,
    Fetched,
    Indexed,
    Left,
    Progressed,
    RemoveSegment,
    StartRun,
)
from services.loader.format.segment import Layout
from services.loader.load import LoadReport, load_segment
from shared.contracts.models import ModelCard
from shared.contracts.phases import Phase
from shared.errors import CheckpointInvalid, ThawError
from shared.telemetry.timeline import Timeline
from shared.telemetry.tracing import context_of, record_phases

log = logging.getLogger(__name__)
REPORT_INTERVAL_S = 0.05
_AT_ONCE = 16
_SPEEDS_KEPT = 8


@dataclass
class Run:
    """A load run. `cancelled` ends it within a chunk's time; `wake`: fetched or cancelled."""

    order: StartRun
    timeline: Timeline = field(default_factory=lambda: Timeline("loader"))
    cancelled: threading.Event = field(default_factory=threading.Event)
    wake: threading.Event = field(default_factory=threading.Event)
    fetched: int = 0
    loaded: int = 0
    reported: float = 0.0
    lock: threading.Lock = field(default_factory=threading.Lock)


class Runs:
    """`emit` is called from the threads; the shell brings its events to the loop."""

    def __init__(self, prefix: str, threads: int, emit: Callable[[Event], None]) -> None:
        self._prefix, self._threads, self._emit = prefix, threads, emit
        self._runs: dict[int, Run] = {}
        self._speeds: list[tuple[int, float]] = []
        self._pool = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="load")
        # Removals never wait behind loads: the memory they free may be what a load waits for.
        self._removals = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="remove")

    @property
    def bytes_per_second(self) -> float | None:
        """Over the latest loads together."""
        seconds = sum(s for _, s in self._speeds)
        return sum(b for b, _ in self._speeds) / seconds if seconds > 0 else None

    def timeline(self, run: int) -> Timeline | None:
        """The phases of a run; None for segments adopted from an earlier loader."""
        found = self._runs.get(run)
        return found.timeline if found else None

    def start(self, order: StartRun) -> None:
        run = self._runs[order.run] = Run(order)
        self._pool.submit(self._guarded, run)

    def cancel(self, run: int) -> None:
        if (found := self._runs.get(run)) is not None:
            found.cancelled.set()
            found.wake.set()

    def remove(self, order: RemoveSegment, forget: Callable[[str], None]) -> None:
        def work() -> None:
            freed = 0
            try:
                forget(order.segment)
                freed = remove_segment(order.segment)
            except OSError:
                log.exception("could not remove a segment", extra={"segment": order.segment})
            self._emit(Left(order.weights_id, order.run, freed))

        self._runs.pop(order.run, None)
        self._removals.submit(work)

    def close(self) -> None:
        """Call off what runs, and wait for it."""
        for run in list(self._runs):
            self.cancel(run)
        self._pool.shutdown(cancel_futures=True)
        self._removals.shutdown()

    def _guarded(self, run: Run) -> None:
        order = run.order
        segment = f"{self._prefix}{order.weights_id[:16]}-{uuid.uuid4().hex[:8]}"
        try:
            report = self._load(run, segment)
        except Cancelled:
            # The memory of a called-off load is free once the engine that may have mapped it is gone.
            self._over(run, Left(order.weights_id, order.run, run.loaded if await_unmapped(segment) else 0))
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
        self._speeds = [*self._speeds, (report.total_bytes, report.read_seconds)][-_SPEEDS_KEPT:]
        log.info(
            "loaded",
            extra={
                "model": order.card.name,
                "bytes": report.total_bytes,
                "seconds": round(report.seconds, 3),
                "gb_per_s": round(report.bytes_per_second / 1e9, 2),
            },
        )
        self._emit(Completed(order.weights_id, order.run))

    def _over(self, run: Run, event: Left | Failed) -> None:
        self._runs.pop(run.order.run, None)
        self._emit(event)

    def _failed(self, run: Run, error: ThawError) -> None:
        log.warning("a load failed", extra={"model": run.order.card.name, "code": error.code, "error": error.message})
        self._over(run, Failed(run.order.weights_id, run.order.run, error.body()))

    def _load(self, run: Run, segment: str) -> LoadReport:
        order, card = run.order, run.order.card
        began = time.monotonic()
        directory = self._fetch(run)
        if run.fetched:
            run.timeline.add(Phase.FETCH, began, time.monotonic(), bytes=run.fetched)

        def on_index(layout: Layout) -> None:
            self._emit(Indexed(order.weights_id, order.run, segment, str(directory), layout.total_bytes))
            on_bytes(layout.header.data_offset)

        def on_bytes(count: int) -> None:
            with run.lock:
                run.loaded += count
                loaded = run.loaded
            if self._due(run):
                self._emit(Progressed(order.weights_id, order.run, loaded))

        run.timeline.begin(Phase.LOAD)
        report: LoadReport | None = None
        try:
            report = load_segment(
                directory,
                segment,
                ReadOptions(threads=self._threads),
                weights_id=order.weights_id,
                cancelled=run.cancelled,
                on_layout=lambda layout: _check_size(card, layout),
                on_index=on_index,
                on_bytes=on_bytes,
            )
        finally:
            run.timeline.end(Phase.LOAD, **(_detail(report) if report is not None else {"loaded_bytes": run.loaded}))
        return report

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


def _check_size(card: ModelCard, layout: Layout) -> None:
    """Memory was reserved by what the registration said: a checkpoint that has grown or shrunk since must be registered again."""
    if layout.total_bytes != card.info.weights_bytes:
        raise CheckpointInvalid(
            f"the weight files of {card.name} have changed since it was registered ({layout.total_bytes} bytes instead of "
            f"{card.info.weights_bytes}); register it again (thaw models add)"
        )


def _detail(report: LoadReport) -> dict[str, str | int | float]:
    return {
        "bytes": report.total_bytes,
        "gb_per_s": round(report.bytes_per_second / 1e9, 3),
        "direct_bytes": report.stats.direct,
        "cached_bytes": report.stats.cached,
    }
