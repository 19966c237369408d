"""Copies of segments from the pool to devices (ADR 0027).

A load run fills a segment in the pool. Each byte range is copied as soon as it is loaded, to every
arena of the run: its memory on one device.
"""

from __future__ import annotations

import ctypes
import logging
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial

from services.loader.adapters.arrivals import Arrivals
from services.loader.adapters.device_links import list_links
from services.loader.adapters.worker_threads import WorkerThreads
from services.loader.domain.effects import CloseArena, OpenArena
from services.loader.domain.events import ArenaClosed, CopiedToDevice, Event
from services.loader.domain.ownership import Arenas
from shared.contracts.base import ErrorBody
from shared.contracts.loader import LinkStatus
from shared.contracts.phases import Phase, PhaseSpan
from shared.contracts.segment import HEADER_BYTES, ArenaHandle, SegmentHeader, SegmentIndex, SegmentTensor
from shared.errors import DeviceFailed, NotFound, ThawError
from shared.telemetry.timeline import Timeline
from weights.devices.port import Arena, Contents, Place, Priority
from weights.formats.segment import Layout
from weights.pool.chunks import CHUNK_BYTES
from weights.pool.memory import PoolMemory, read_mappings
from weights.pool.region import Region
from weights.sources.open import is_remote
from weights.store.arena import PagedArena
from weights.store.auditing import Audit
from weights.store.cost import Tier
from weights.store.gpu_device import GpuDevice
from weights.store.node_devices import NodeDevices
from weights.store.residency import KnownUnits
from weights.store.separate import SeparateDevice
from weights.store.usage import PagesInUse

log = logging.getLogger(__name__)
_CLOSER_THREADS = 4


@dataclass
class _Copy:
    """The copy of a run to one device.

    Attributes:
        arena: Its memory; None before it is allocated, and once it is released.
        handle: Opens the arena in an engine; None until it has memory.
        error: The reason why the copy failed.
        freed: Bytes that the release freed.
        is_finished: The copy is complete, failed or closed.
        lock: Held while memory is allocated or released: a second caller waits for that.
    """

    order: OpenArena
    arena: Arena | None = None
    handle: ArenaHandle | None = None
    error: ErrorBody | None = None
    is_closing: bool = False
    freed: int = 0
    is_finished: bool = False
    arrivals: Arrivals = field(default_factory=Arrivals)
    timeline: Timeline = field(default_factory=lambda: Timeline("loader"))
    lock: threading.Lock = field(default_factory=threading.Lock)


@dataclass
class _Source:
    """A run's bytes in host memory.

    Attributes:
        layout: The segment's layout; None if an earlier loader has loaded it.
        ranges: Offsets and sizes in the segment in order of arrival, each once.
        is_sparse: Only the bytes that a device lacks are read, and given back after the copy.
    """

    weights_id: str
    region: Region
    layout: Layout | None = None
    ranges: list[tuple[int, int]] = field(default_factory=list)
    copies: list[_Copy] = field(default_factory=list)
    is_sparse: bool = False


class Copies:
    """The arenas of all runs.

    The device's own thread copies; one thread for each arena waits for its last byte.
    """

    def __init__(
        self,
        devices: NodeDevices,
        pool: PoolMemory,
        emit: Callable[[Event], None],
        is_on_disk: Callable[[str], bool] = lambda _: False,
    ) -> None:
        """Copy from `pool` to `devices`.

        Args:
            emit: Called from threads.
            is_on_disk: Returns whether this host's disk has weights, by their id.
        """
        self._devices, self._pool, self._emit, self._is_on_disk = devices, pool, emit, is_on_disk
        self._remote: dict[str, bool] = {}
        devices.price_by(self._tier_of)
        self._lock = threading.Lock()
        self._progress = threading.Condition()
        self._sources: dict[int, _Source] = {}
        self._copies: dict[int, _Copy] = {}
        self._copiers = WorkerThreads("copy-to-device")
        self._closers = ThreadPoolExecutor(_CLOSER_THREADS, thread_name_prefix="close-arena")

    def expect(self, likelihoods: Mapping[str, float] | None) -> None:
        """Price units by the likelihoods of weights, by their id; None: all are equal."""
        self._devices.expect(likelihoods)

    @property
    def known(self) -> KnownUnits:
        """The units of weights."""
        return self._devices.known

    # -- loading -----------------------------------------------------------------------------------

    def is_separate(self, device: str) -> bool:
        """Return whether the device is a cpu device with memory of its own."""
        return device in self._devices.separate

    def count_missing(self, weights_id: str, layout: Layout) -> dict[str, int]:
        """Return the bytes to read where a device has some of the units, by device."""
        return self._devices.count_missing(weights_id, Contents(layout.tensors, _digests(layout)))

    def begin(self, run: int, weights_id: str, region: Region, layout: Layout | None = None, *, is_sparse: bool = False) -> None:
        """Register the memory of a run, before its first byte is loaded.

        Args:
            is_sparse: Only the bytes that its one device lacks are read; hashes must match then.
        """
        with self._lock:
            self._sources[run] = _Source(weights_id, region, layout, is_sparse=is_sparse)

    def wait_lacking(
        self, run: int, device: str, cancelled: threading.Event, seen: Collection[tuple[int, int]] = ()
    ) -> tuple[tuple[int, int], ...]:
        """Wait for the run's arena on a device, and return the ranges that it lacks.

        Args:
            seen: Ranges to leave out.

        Returns:
            Offsets and sizes; none if the arena failed or was closed, or the run was cancelled.
        """

        def find_copy() -> _Copy | None:
            source = self._sources.get(run)
            return next((c for c in source.copies if c.order.device == device), None) if source is not None else None

        def is_planned() -> bool:
            found = find_copy()
            return cancelled.is_set() or (found is not None and (found.arena is not None or found.is_finished))

        with self._progress:
            self._progress.wait_for(is_planned)
        found = find_copy()
        arena = found.arena if found is not None else None
        return arena.wait_for_missing(seen, cancelled) if isinstance(arena, PagedArena) else ()

    def wait_until_finished(self, run: int, cancelled: threading.Event) -> None:
        """Wait until the run's copies are complete, failed or closed, or the run is cancelled."""
        with self._progress:
            self._progress.wait_for(lambda: cancelled.is_set() or all(c.is_finished for c in self._sources[run].copies))

    def wake(self) -> None:
        """Wake the runs that wait here, so that a cancelled one ends."""
        with self._progress:
            self._progress.notify_all()

    def copy_range(self, run: int, offset: int, nbytes: int) -> None:
        """Copy bytes that are now in host memory to the run's arenas. They may cross chunks."""
        if (source := self._sources.get(run)) is None:
            return
        if source.copies:
            self._pin(source, offset, nbytes)
        with self._lock:
            source.ranges.append((offset, nbytes))
            if source.copies:  # a copy may have been opened meanwhile; pinning a pinned chunk costs nothing
                self._pin(source, offset, nbytes)
            arenas = [c.arena for c in source.copies if c.arena is not None and not c.is_closing]
            for arena in arenas:  # within the lock, so that an arena opened meanwhile gets every range once
                self._fill(source.region, arena, offset, nbytes)

    def open(self, order: OpenArena) -> None:
        copy = _Copy(order)
        with self._lock:
            self._copies[order.number] = copy
            source = self._sources.get(order.run)
            if source is None:  # loaded by an earlier loader
                region = Region(self._pool, order.chunks, order.total_bytes)
                source = self._sources[order.run] = _Source(order.weights_id, region, None, [(0, order.total_bytes)])
            source.copies.append(copy)
            self._remote[order.weights_id] = is_remote(order.source)
        self._copiers.run(partial(self._copy_to_device, copy, source))

    def raise_priority(self, run: int) -> None:
        """Copy the run's bytes before background copies: a request waits for them."""
        with self._lock:
            source = self._sources.get(run)
            for copy in source.copies if source is not None else ():
                if copy.arena is not None:
                    copy.arena.raise_priority(Priority.REQUEST)

    def handle(self, run: int, device: str | None) -> ArenaHandle | None:
        """Return the handle that an engine on `device` opens.

        None until the arena has memory there.
        """
        with self._lock:
            copy = self._find_open(run, device)
            return copy.handle if copy is not None else None

    def arrivals(self, run: int, device: str) -> Arrivals | None:
        """Return the arrivals of the run's units on a device."""
        with self._lock:
            copy = self._find_open(run, device)
            return copy.arrivals if copy is not None else None

    def export(self, run: int, device: str, indexes: Sequence[int], pid: int) -> list[int]:
        """Return descriptors of units on a GPU, for a process. The caller closes them.

        Raises:
            NotFound: The GPU does not have units of the run.
        """
        with self._lock:
            copy = self._find_open(run, device)
            arena = copy.arena if copy is not None else None
        found = self._devices.get(device)
        if not isinstance(arena, PagedArena) or not isinstance(found, GpuDevice):
            raise NotFound(f"{device} has no units of these weights. Attach again")
        return found.export(arena, indexes, pid)

    def _find_open(self, run: int, device: str | None) -> _Copy | None:
        source = self._sources.get(run)
        copies = source.copies if source is not None else []
        return next((c for c in copies if c.order.device == device and not c.is_closing), None)

    def phases(self, run: int, device: str, instance_id: str) -> tuple[PhaseSpan, ...]:
        """Return the phases of a copy to a device with units, if the instance waited for it."""
        with self._lock:
            source = self._sources.get(run)
            copies = source.copies if source is not None and device in self._devices.paged else []
            waited = [c for c in copies if c.order.device == device and instance_id in c.order.opened_for]
            return waited[-1].timeline.spans() if waited else ()

    def error(self, run: int, device: str | None) -> ErrorBody | None:
        """Return why a copy failed that engines cannot do without.

        Engines need the copy on a cpu device with memory of its own. If a copy to a GPU failed, an
        engine copies the weights from host memory itself, unless that has only part of them.
        """
        with self._lock:
            source = self._sources.get(run)
            is_needed = source is not None and (device in self._devices.separate or source.is_sparse)
            copies = source.copies if source is not None and is_needed else []
            return next((c.error for c in copies if c.order.device == device and c.error is not None), None)

    # -- releasing ---------------------------------------------------------------------------------

    def close(self, order: CloseArena) -> None:
        copy = self._copies.get(order.number)
        self._closers.submit(self._close, order.number, copy)

    def remove(self, run: int) -> Callable[[], int]:
        """Remove the run.

        Returns:
            A function that releases the run's arenas and returns their bytes. It may block for a
            moment. Call it before the run's chunks are reused.
        """
        with self._lock:
            source = self._sources.pop(run, None)
        copies = tuple(source.copies) if source is not None else ()

        def release() -> int:
            freed = sum(self._release(c) for c in copies)
            with self._lock:
                for c in copies:
                    self._copies.pop(c.order.number, None)
            return freed

        return release

    def shut_down(self) -> None:
        """Release all device memory. No byte may arrive afterwards."""
        self._closers.shutdown()
        for run in tuple(self._sources):
            self.remove(run)()
        self._copiers.close()
        self._devices.close()

    # -- status ------------------------------------------------------------------------------------

    def on_devices(self, run: int) -> dict[str, int]:
        """Return the bytes of device memory that the run takes, by device."""
        with self._lock:
            source = self._sources.get(run)
            return {c.order.device: c.arena.nbytes for c in source.copies if c.arena is not None} if source is not None else {}

    def pages(self) -> tuple[PagesInUse, ...]:
        """Return the use of each device that keeps units."""
        return tuple(device.pages() for device in self._devices.paged.values())

    def audit(self) -> dict[str, tuple[Audit, Arenas]]:
        """Audit each device that keeps units, and return the arenas that it should have.

        The mappings of processes are read once for all devices.
        """
        devices = dict(self._devices.paged)
        before = {name: device.begin_audit() for name, device in devices.items()}
        mappings = read_mappings() if any(not isinstance(d, GpuDevice) for d in devices.values()) else {}
        return {name: self._audit(name, device.end_audit(before[name], mappings)) for name, device in devices.items()}

    def _audit(self, name: str, found: Audit) -> tuple[Audit, Arenas]:
        with self._lock:
            copies = tuple(self._copies.items())
        mine = [(n, c) for n, c in copies if c.order.device == name]
        # While an arena is opened or released, its copy holds the lock and does not refer to it.
        under_way = sum(c.lock.locked() for _, c in mine)
        arenas = {c.arena.holder: (c.order.weights_id, n) for n, c in mine if isinstance(c.arena, PagedArena)}
        lost = sorted(found.snapshot.open_arenas - arenas.keys())[under_way:]
        return replace(found, violations=(*found.violations, *(f"{a} is open, and no load uses it" for a in lost))), arenas

    def _tier_of(self, weights_id: str) -> Tier:
        """Return where the bytes of weights would come from."""
        if any(s.weights_id == weights_id and not s.is_sparse for s in tuple(self._sources.values())):
            return "dram"
        return "remote" if self._remote.get(weights_id) and not self._is_on_disk(weights_id) else "ssd"

    def links(self) -> tuple[LinkStatus, ...]:
        """Return the links of all devices, with the copies that are under way."""
        with self._lock:
            under_way = [
                (c.order.device, c.order.model) for c in self._copies.values() if c.arena and c.arena.watermark < c.arena.nbytes
            ]
        return list_links(self._devices, under_way)

    # -- threads -----------------------------------------------------------------------------------

    def _copy_to_device(self, copy: _Copy, source: _Source) -> None:
        try:
            self._copy(copy, source)
        finally:
            copy.is_finished = True
            self.wake()

    def _copy(self, copy: _Copy, source: _Source) -> None:
        order = copy.order
        copy.timeline.begin(Phase.LOAD, device=order.device)
        try:
            arena = self._allocate(copy, source)
            self.wake()
            if isinstance(arena, PagedArena):
                _report(arena, copy.arrivals)
            else:
                copy.arrivals.end_unreported()
            if arena is None or not arena.wait(order.total_bytes):
                return  # closed meanwhile
            with copy.lock:
                copy.handle = arena.handle() if not copy.is_closing else None
        except ThawError as e:
            log.warning("failed to copy weights to a device", extra={"device": order.device, "error": e.message})
            self._release(copy)
            copy.error = e.body()
            self._emit(CopiedToDevice(order.weights_id, order.number, failed=True))
            return
        except Exception:  # the end of the thread: those that wait for the copy need a result
            log.exception("failed to copy weights to a device", extra={"device": order.device})
            self._release(copy)
            copy.error = DeviceFailed(f"The copy of weights to {order.device} failed").body()
            self._emit(CopiedToDevice(order.weights_id, order.number, failed=True))
            return
        copy.timeline.end(Phase.LOAD)
        self._emit(CopiedToDevice(order.weights_id, order.number))

    def _allocate(self, copy: _Copy, source: _Source) -> Arena | None:
        order, region = copy.order, source.region
        device = self._devices.get(order.device)
        with copy.lock:
            if copy.is_closing:
                return None
            contents = self._contents(order, source) if isinstance(device, SeparateDevice) else None
            place = Place(order.weights_id, order.total_bytes, self._pool.name or "", region.extents, contents)
            arena = device.allocate(place, Priority.BACKGROUND if order.background else Priority.REQUEST)
            for offset, nbytes in tuple(source.ranges):
                self._pin(source, offset, nbytes)
            with self._lock:
                copy.arena = arena
                for offset, nbytes in source.ranges:
                    self._pin(source, offset, nbytes)
                    self._fill(region, arena, offset, nbytes)
            copy.handle = arena.handle()
        return arena

    def _contents(self, order: OpenArena, source: _Source) -> Contents:
        """Return the tensors of a run, and the hashes that its checkpoint's index has."""
        if source.layout is None:
            return Contents(_index_of(source.region), {}, order.model, order.pinned)
        digests = _digests(source.layout)
        return Contents(source.layout.tensors, digests, order.model, order.pinned, must_match=source.is_sparse)

    def _fill(self, region: Region, arena: Arena, offset: int, nbytes: int) -> None:
        """Copy chunk by chunk, since chunks are not contiguous.

        Errors of the device are left to `arena.wait`, which raises them.
        """
        end = offset + nbytes
        while offset < end:
            length = min(end - offset, CHUNK_BYTES - offset % CHUNK_BYTES)
            try:
                arena.fill(offset, _address(region, offset, length), length)
            except ThawError:  # only the copy has failed: the load into host memory continues
                return
            offset += length

    def _pin(self, source: _Source, offset: int, nbytes: int) -> None:
        """Page-lock the chunks of these bytes.

        A chunk without all of its memory (the last one, and those of a sparse run) is not locked:
        the driver copies it through a buffer of its own.
        """
        if source.is_sparse:
            return
        region = source.region
        for index in range(offset // CHUNK_BYTES, -(-(offset + nbytes) // CHUNK_BYTES)):
            if (index + 1) * CHUNK_BYTES <= region.nbytes:
                self._devices.pin(_address(region, index * CHUNK_BYTES, CHUNK_BYTES), CHUNK_BYTES)

    def _close(self, number: int, copy: _Copy | None) -> None:
        freed = self._release(copy) if copy is not None else 0
        with self._lock:
            self._copies.pop(number, None)
            if copy is not None and (source := self._sources.get(copy.order.run)) is not None and copy in source.copies:
                source.copies.remove(copy)
        self._emit(ArenaClosed(number, freed))

    def _release(self, copy: _Copy) -> int:
        copy.is_closing = True
        with copy.lock:
            with self._lock:
                arena, copy.arena, copy.handle = copy.arena, None, None
            try:
                copy.freed = arena.release() if arena is not None else copy.freed
            except Exception:  # the caller waits for this release; bytes that may be in use do not count as freed
                log.exception("failed to release device memory", extra={"device": copy.order.device})
            return copy.freed


def _digests(layout: Layout) -> dict[str, str]:
    """Return the hashes of tensors that a checkpoint's index has."""
    return {t.name: t.sha256 for p in layout.places for t in p.file.header.tensors if t.sha256}


def _report(arena: PagedArena, arrivals: Arrivals) -> None:
    """Report units as they arrive, until all are there or the arena is released."""
    arrivals.add(arena.layout())
    count = 0
    while units := arena.wait_units(count):
        count += len(units)
        arrivals.add(*units)


def _address(region: Region, offset: int, length: int) -> int:
    with region.view(offset, length) as view:
        anchor = ctypes.c_char.from_buffer(view)
        address = ctypes.addressof(anchor)
        del anchor
    return address


def _index_of(region: Region) -> tuple[SegmentTensor, ...]:
    """Read the index of a segment that an earlier loader has loaded."""
    with region.view(0, HEADER_BYTES) as head:
        header = SegmentHeader.model_validate_json(bytes(head).rstrip(b"\0"))
    raw, at, end = bytearray(), header.index_offset, header.index_offset + header.index_bytes
    while at < end:
        length = min(end - at, CHUNK_BYTES - at % CHUNK_BYTES)
        with region.view(at, length) as view:
            raw += view
        at += length
    return SegmentIndex.model_validate_json(bytes(raw)).tensors
