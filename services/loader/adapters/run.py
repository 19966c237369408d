"""Run one load in a thread: open the fastest source, request chunks, fill them."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path

from services.loader.adapters.arrivals import Arrivals
from services.loader.adapters.device_copies import Copies
from services.loader.adapters.progress import Progress
from services.loader.adapters.resident import ResidentFiles
from services.loader.domain.effects import StartRun
from services.loader.domain.events import Event, Indexed, LaidOut
from shared.contracts.models import ModelCard
from shared.contracts.phases import Phase
from shared.contracts.segment import ByteRange
from shared.errors import CheckpointInvalid
from shared.telemetry.timeline import Timeline
from weights.cache.caching import CachingTier
from weights.formats.checkpoint import Checkpoint, parse_json, read_small
from weights.formats.inspect import CONFIG
from weights.formats.ranks import file_of_rank, rows_of_rank
from weights.formats.segment import Layout, lay_out, pages
from weights.pool.chunks import CHUNK_BYTES
from weights.pool.memory import PoolMemory
from weights.pool.region import Region
from weights.pool.shm import free_bytes, no_room
from weights.sources.failover import FailoverTier
from weights.sources.open import is_remote
from weights.sources.sources import Sources
from weights.sources.striped import StripedFiles
from weights.tiers.port import Cancelled, Tier
from weights.transfer.fill import Filling, PieceReader
from weights.transfer.links import Links
from weights.transfer.pieces import TAIL_PIECE_BYTES, Piece, cut, cut_ranges, in_execution_order
from weights.transfer.reader import FilesReader, ReadOptions, ReadStats
from weights.transfer.remote import StripedReader, TierReader
from weights.transfer.stripe_plan import StripeSource, piece_bytes
from weights.transfer.verification import verify_region

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Threads:
    """Threads that read from each disk, and from each remote host."""

    disk: int = 4
    remote: int = 8


@dataclass(frozen=True)
class RunContext:
    """The common context of all runs.

    Attributes:
        emit: Passes an event to the loop, from any thread.
    """

    pool: PoolMemory
    sources: Sources
    emit: Callable[[Event], None]
    threads: Threads
    links: Links
    progress: Progress
    copies: Copies | None = None
    verify: bool = False
    free_memory: Callable[[], None] = lambda: None
    """Called before a run measures free memory; it may block."""


class Denied(Exception):
    """The loop has no chunks for the run."""


@dataclass
class Run:
    """A load of one model's weights.

    Attributes:
        cancelled: Ends the run within a piece's time.
        wake: Set when the source is open, or the run is granted chunks or cancelled.
        opened: Set when `tier` is, or when the run ends without one.
        read_bytes: Bytes read from the source so far, when reading has ended.
        kept_bytes: Bytes that are left in host memory after a copy to a device; None: all.
        wanted: Ranges of the segment that are being read; none: all of it.
        resident: Files that other nodes may read from host memory: it has all of a remote model.
        is_reused: Instances that attach from now on did not wait for this run.
        is_removed: The run's chunks may be freed or reused.
        arrived_bytes: Bytes loaded in any order. `arrived_lock` guards it.
    """

    order: StartRun
    context: RunContext
    timeline: Timeline = field(default_factory=lambda: Timeline("loader"))
    cancelled: threading.Event = field(default_factory=threading.Event)
    wake: threading.Event = field(default_factory=threading.Event)
    opened: threading.Event = field(default_factory=threading.Event)
    granted: Future[tuple[tuple[int, ...], str | None]] = field(default_factory=Future)
    filling: Filling | None = None
    tier: Tier | None = None
    region: Region | None = None
    background: bool = False
    resident: ResidentFiles | None = None
    is_reused: bool = False
    is_removed: bool = False
    loaded: int = 0
    arrived_bytes: int = 0
    arrived_lock: threading.Lock = field(default_factory=threading.Lock)
    read_bytes: int = 0
    kept_bytes: int | None = None
    wanted: tuple[tuple[int, int], ...] = ()
    arrivals: Arrivals = field(default_factory=Arrivals)

    def load(self) -> tuple[int, float]:
        """Load the weights. Raises `Cancelled`, or a `ThawError`.

        Returns:
            Bytes loaded, and the seconds that reading took.
        """
        order, began = self.order, time.monotonic()
        tier, directory, checkpoint = self._open_fastest()
        self.tier = tier
        self.opened.set()
        phase = Phase.FETCH if tier.directory is None else Phase.LOAD
        stats, seconds = ReadStats(), 0.0
        try:
            layout = lay_out(checkpoint, order.weights_id)
            _check_size(order.card, layout)
            if checkpoint.ranks > 1:
                layout = lay_out(file_of_rank(checkpoint, order.rank), order.weights_id, order.layers)
            elif order.is_part:
                layout = lay_out(checkpoint, order.weights_id, order.layers, _rows(order, checkpoint, directory))
            chunks, device = self._chunks(layout)
            self.region = Region(self.context.pool, chunks, layout.total_bytes)
            reading = time.monotonic()
            if device is not None:
                self._load_lacking(tier, layout, self.region, directory, stats, device)
            else:
                self._load_all(tier, layout, self.region, directory, stats)
            seconds = time.monotonic() - reading
        finally:
            self.context.progress.end(order.run)
            self.read_bytes = stats.direct + stats.cached + stats.buffered + stats.remote
            self.timeline.add(phase, began, time.monotonic(), **self._detail(stats, seconds))
        return self.read_bytes if device is not None else layout.total_bytes, seconds

    def call_off(self) -> None:
        self.cancelled.set()
        self.wake.set()
        self.opened.set()

    def raise_priority(self) -> None:
        """Give the run a request's priority: one waits for it now."""
        self.background = False
        if self.filling is not None:
            self.filling.raise_priority()

    def grant(self, chunks: tuple[int, ...] | None, device: str | None = None) -> None:
        """Give the run its chunks; None: it gets none.

        Args:
            device: Read only what this device lacks.
        """
        if self.granted.done():
            return
        if chunks is None:
            self.granted.set_exception(Denied())
        else:
            self.granted.set_result((chunks, device))
        self.wake.set()

    def close(self) -> None:
        if self.tier is not None:
            self.tier.close()

    # -- steps -------------------------------------------------------------------------------------

    def _open_fastest(self) -> tuple[Tier, Path, Checkpoint]:
        """Open the fastest source of the model, and check its headers.

        A cancelled run does not wait for a host that hangs.
        """
        card, sources = self.order.card, self.context.sources
        found: Future[tuple[Tier, Path, Checkpoint]] = Future()

        def work() -> None:
            tier: Tier | None = None
            try:
                follows = not self.order.is_part
                tier = sources.open(card.info.source, card.info.revision, pinned=card.spec.pin, follows=follows)
                opened = sources.checkpoint(tier, trust_remote_code=card.spec.trust_remote_code, registered=card.info.revision)
                found.set_result((tier, *opened))
            except BaseException as e:
                found.set_exception(e)
                if tier is not None:
                    tier.close()
            self.wake.set()
            if self.cancelled.is_set() and tier is not None:
                tier.close()

        threading.Thread(target=work, name="open", daemon=True).start()
        self.wake.wait()
        if self.cancelled.is_set():
            if found.done() and found.exception() is None:
                found.result()[0].close()
            raise Cancelled
        return found.result()

    def _chunks(self, layout: Layout) -> tuple[tuple[int, ...], str | None]:
        """Request chunks from the loop, which may evict others first.

        Returns:
            The chunks, and the device whose lacking bytes alone are to be read; None: all are.
        """
        nbytes, copies = layout.total_bytes, self.context.copies
        found = copies.count_missing(self.order.weights_id, layout) if copies is not None else {}
        lacking = {device: len(layout.head) + n for device, n in found.items()}
        self.wake.clear()
        self.context.free_memory()
        self.context.emit(LaidOut(self.order.weights_id, self.order.run, nbytes, free_bytes(), lacking))
        if not self.cancelled.is_set():
            self.wake.wait()
        if self.cancelled.is_set():
            raise Cancelled
        try:
            return self.granted.result()
        except Denied:
            raise no_room(nbytes) from None

    def _load_all(self, tier: Tier, layout: Layout, region: Region, directory: Path, stats: ReadStats) -> None:
        order, context = self.order, self.context
        pieces = cut(layout, _piece_bytes(tier, layout), remote=tier.directory is None)
        if context.copies is not None:
            context.copies.begin(order.run, order.weights_id, region, layout)
        filling = self._filling(layout, region, pieces)
        filling.write_head()
        self._report_indexed(tier, layout, directory, filling.loaded)
        self._read(tier, layout, region, filling, stats)
        if not order.is_part:
            tier.finish(self.cancelled)
        elif isinstance(tier, CachingTier):
            tier.finish_part()
        # The checksums of a remote source's files need every byte: only those of tensors are left.
        if context.verify or (order.is_part and tier.directory is None):
            source = tier.source if tier.directory is None else None
            verify_region(layout, region, cancelled=self.cancelled, source=source)
        if not order.is_part and is_remote(order.card.info.source):
            self.resident = ResidentFiles(order.card.info, tier.files(), layout, region, lambda: not self.is_removed)

    def _load_lacking(self, tier: Tier, layout: Layout, region: Region, directory: Path, stats: ReadStats, device: str) -> None:
        """Read what `device` lacks, and give the memory back after the copy (ADR 0058)."""
        order, copies = self.order, self.context.copies
        assert copies is not None
        copies.begin(order.run, order.weights_id, region, layout, is_sparse=True)
        region.write(0, layout.head)
        copies.copy_range(order.run, 0, len(layout.head))
        self.arrived_bytes = len(layout.head)
        self._report_indexed(tier, layout, directory, len(layout.head))
        seen: set[tuple[int, int]] = set()
        while ranges := copies.wait_lacking(order.run, device, self.cancelled, seen):
            self.wanted = ranges
            pieces = cut_ranges(layout, ranges, remote=tier.directory is None)
            self._read(tier, layout, region, self._filling(layout, region, pieces, sparse=True), stats)
            seen.update(ranges)
        copies.wait_until_finished(order.run, self.cancelled)
        if self.cancelled.is_set():
            raise Cancelled
        tier.close()  # a cache reads this memory until then
        self.kept_bytes = pages(len(layout.head))
        region.discard(self.kept_bytes)

    def _filling(self, layout: Layout, region: Region, pieces: tuple[Piece, ...], *, sparse: bool = False) -> Filling:
        self.filling = Filling(
            layout,
            region,
            pieces,
            background=self.background,
            cancelled=self.cancelled,
            on_loaded=self._on_loaded,
            on_arrived=self._on_arrived,
            # Other engines read the segment in the order of its bytes.
            order=in_execution_order(layout, pieces) if self.order.card.spec.engine == "builtin" else (),
            sparse=sparse,
            model=self.order.card.name,
        )
        if not self.background:  # the priority rose before `filling` was set
            self.filling.raise_priority()
        return self.filling

    def _report_indexed(self, tier: Tier, layout: Layout, directory: Path, loaded: int) -> None:
        """Report that readers may map the segment."""
        order, context = self.order, self.context
        context.emit(Indexed(order.weights_id, order.run, str(directory), layout.total_bytes))
        context.progress.begin(order, remote=tier.directory is None)
        self._on_loaded(loaded)

    def _read(self, tier: Tier, layout: Layout, region: Region, filling: Filling, stats: ReadStats) -> None:
        context = self.context
        if isinstance(tier, CachingTier) and isinstance(tier.inner, FailoverTier):
            self._read_striped(tier, tier.inner, layout, region, filling, stats)
            return
        reader: PieceReader
        if tier.directory is None:
            reader, threads = TierReader(tier, layout.places, region, self.cancelled), context.threads.remote
        else:
            threads = context.threads.disk
            reader = FilesReader(layout.places, filling.order, region, ReadOptions(threads=threads))
        try:
            filling.run(reader, context.links.get(tier.link, threads))
        finally:
            stats.add(reader.stats)

    def _read_striped(
        self, tier: CachingTier, far: FailoverTier, layout: Layout, region: Region, filling: Filling, stats: ReadStats
    ) -> None:
        """Read from all places that have the model at once (ADR 0089)."""
        threads, reader = self.context.threads.remote, StripedReader(StripedFiles(tier, far), layout.places, region)
        peers = sum(p.is_peer for p in far.places)
        sources = [
            StripeSource(p.tier.link, max(2, -(-threads // peers)) if p.is_peer else threads, p.is_reserve) for p in far.places
        ]
        try:
            filling.run_striped(reader, sources, [self.context.links.get(s.name, threads) for s in sources])
        finally:
            stats.add(reader.stats)
            log.info("read from several sources", extra={"model": self.order.card.name, "bytes": filling.read_by_source})

    def _on_arrived(self, offset: int, nbytes: int) -> None:
        with self.arrived_lock:
            self.arrived_bytes += nbytes
        if self.context.copies is not None:
            # Whole pages are read; bytes beside a wanted range are not reported.
            for start, end in self.wanted or ((offset, offset + nbytes),):
                first, last = max(start, offset), min(end, offset + nbytes)
                if first < last:
                    self.context.copies.copy_range(self.order.run, first, last - first)
        self.arrivals.add(ByteRange(offset=offset, nbytes=nbytes))

    def _on_loaded(self, watermark: int) -> None:
        self.loaded = max(self.loaded, watermark)
        self.context.progress.record_loaded(self.order.run, watermark, self.arrived_bytes)

    def _detail(self, stats: ReadStats, seconds: float) -> dict[str, str | int | float]:
        if not seconds:
            return {"loaded_bytes": self.loaded}
        total = stats.direct + stats.cached + stats.buffered + stats.remote
        return {
            "bytes": self.loaded,
            "gb_per_s": round(total / max(seconds, 1e-9) / 1e9, 3),
            "direct_bytes": stats.direct,
            "cached_bytes": stats.cached,
        }


def _rows(order: StartRun, checkpoint: Checkpoint, directory: Path) -> dict[str, range]:
    """Return the rows of tensors that the order's rank needs; none of an unknown architecture."""
    path = directory / CONFIG
    if order.rank is None or not path.is_file():
        return {}
    tensors = (t for f in checkpoint.files for t in f.header.tensors)
    return rows_of_rank(tensors, parse_json(read_small(path), str(path)), order.rank)


def _piece_bytes(tier: Tier, layout: Layout) -> int:
    """Return the length of the load's pieces. Each of its sources reads several."""
    if not isinstance(tier, CachingTier) or not isinstance(tier.inner, FailoverTier):
        return CHUNK_BYTES
    return piece_bytes(layout.total_bytes, len(tier.inner.places), CHUNK_BYTES, TAIL_PIECE_BYTES)


def _check_size(card: ModelCard, layout: Layout) -> None:
    """Check that the checkpoint still has its registered size.

    Memory was reserved for that size. A model that changed must be registered again.
    """
    if layout.total_bytes != card.info.weights_bytes:
        raise CheckpointInvalid(
            f"The weight files of {card.name} have changed since it was registered ({layout.total_bytes} bytes instead of "
            f"{card.info.weights_bytes}). Register it again (thaw models add)"
        )
