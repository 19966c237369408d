"""Commands of the mesh and of local readers, as events of the loop.

Runs on the event loop's thread.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from services.loader import status_publisher
from services.loader.adapters.arrivals import Arrival, Arrivals
from services.loader.adapters.cards import card_for, minimal_card
from services.loader.adapters.disk_copies import DiskCopies
from services.loader.adapters.inspection import Inspections
from services.loader.adapters.model_files import ModelFiles
from services.loader.adapters.peer_sharing import Shared
from services.loader.adapters.reclaim import Reclaimer
from services.loader.adapters.records import Records, WeightsRecord
from services.loader.adapters.runs import Runs
from services.loader.adapters.small_files import read_part
from services.loader.auditing import Auditor
from services.loader.domain.entries import device_of, has_reached
from services.loader.domain.events import (
    Adopt,
    Adopted,
    Attach,
    Event,
    Idle,
    MemoryPressure,
    NodeReported,
    Prepare,
    Release,
    Stop,
)
from services.loader.domain.pretouch import Pretouch
from services.loader.domain.state import Entry, Stage
from services.loader.expectations import Expectations
from services.loader.loop import Loop
from services.loader.prefetching import Arrived, Prefetching
from shared.contracts.audit import AuditMemory, MemoryAudited
from shared.contracts.base import Done, Message
from shared.contracts.loader import (
    AttachWeights,
    CancelPrefetch,
    ExpectModels,
    FetchModelFiles,
    Inspected,
    InspectModel,
    LoaderCommand,
    LoaderStatus,
    ModelFilePart,
    ModelFilesFetched,
    PrefetchWeights,
    PrepareWeights,
    ReadModelFile,
    ReleaseWeights,
    WeightsAttached,
)
from shared.contracts.loader_socket import SocketFollow, SocketMap
from shared.contracts.models import ModelCard
from shared.contracts.node import WEIGHTS_ON_GPU, InstanceState, NodeOutline
from shared.contracts.segment import ByteRange, GpuUnitsHandle
from shared.contracts.stages import DevicePart, RankOf
from shared.errors import NotFound, ShuttingDown, StaleToken, from_body
from shared.tasks import end
from weights.pool.chunks import Chunks
from weights.pool.shm import free_bytes, short_of_memory
from weights.sources.sources import Sources

log = logging.getLogger(__name__)
_INSPECTIONS_AT_ONCE = 8
_UNITS_AT_ONCE = 64
"""Units whose descriptors are sent at once: each is open here meanwhile."""
_MEMORY_READ_EVERY_S = 0.5
"""Seconds between two readings of the host's memory, which take a millisecond each. A node reports
at least every second.
"""
_IDLE_BEFORE_PREPARE_S = 10.0
"""Seconds without a load before memory is populated for the next ones."""


class Loader:
    """The loader's service layer: commands in, replies and statuses out."""

    def __init__(
        self,
        node: str,
        boot_id: str,
        records: Records,
        sources: Sources,
        workers: Callable[[Callable[[Event], None]], tuple[Runs, Reclaimer]],
        chunks: Chunks,
        clock: Callable[[], float] = time.monotonic,
        pretouch: Callable[[], Pretouch] = Pretouch,
    ) -> None:
        """Start without weights.

        Args:
            node: The node's name.
            boot_id: The identity of this process.
            records: Weights of an earlier process, and those of this one for the next.
            sources: Checkpoints by source.
            workers: Creates the threads, which pass their events to the given function.
            chunks: The pool's chunks.
            clock: Monotonic seconds.
            pretouch: Returns the progress of populating the host's memory.
        """
        self._loop = Loop(boot_id, records, workers, chunks, clock)
        self._node, self._boot_id, self._sources = node, boot_id, sources
        self._shares, self._pretouch = False, pretouch
        self._memory_read_at = float("-inf")
        self._auditor = Auditor(self._loop)
        self._disk_copies = DiskCopies(sources, self._loop.runs)
        self._prefetching = Prefetching(self._load_ahead, self._disk_copies, self._end_hold, self._measure_prefetch, clock)
        self._files = ModelFiles(sources, self._disk_copies)
        self._inspections = ThreadPoolExecutor(_INSPECTIONS_AT_ONCE, thread_name_prefix="inspect")
        self._inspecting = Inspections(sources, self._inspections)
        copies = self._loop.runs.copies
        self._expectations = Expectations(copies.expect, copies.known, sources, self._inspections) if copies is not None else None

    @property
    def changed(self) -> asyncio.Event:
        """Set on every change of the state."""
        return self._loop.changed

    # -- in ----------------------------------------------------------------------------------------

    async def handle(self, command: LoaderCommand) -> Message:
        """Return the reply to one command. Raises the `ThawError` that refuses it."""
        match command:
            case InspectModel():
                return Inspected(info=await self._inspecting.describe(command.spec))
            case PrefetchWeights():
                self._refuse_stale("A prefetch", command.token)
                self._prefetching.begin(command)
                return Done()
            case CancelPrefetch(weights_id=weights_id, token=token):
                self._prefetching.cancel(weights_id, token)
                return Done()
            case ExpectModels():
                self._refuse_stale("An expectation", command.token)
                if self._expectations is not None:
                    self._expectations.apply(command)
                return Done()
            case PrepareWeights():
                if not command.background:
                    self._prefetching.yield_to(command.card.info.revision)
                for part in command.parts or (_only_part(command),):
                    await self._prepare(command, part)
                return Done()
            case AttachWeights():
                self._prefetching.yield_to(command.card.info.revision)
                device = self._device(command.device)
                return await self._loop.ask(
                    lambda n: Attach(
                        n,
                        command.instance_id,
                        command.card,
                        command.until,
                        command.traceparent,
                        device=device,
                        layers=command.layers,
                        rank=command.rank,
                    )
                )
            case ReleaseWeights():
                return await self._loop.ask(lambda n: Release(n, command.instance_id))
            case FetchModelFiles(card=card):
                return ModelFilesFetched(directory=str(await self._files.fetch(card)))
            case AuditMemory():
                return await self.audit()

    async def _prepare(self, command: PrepareWeights, part: DevicePart) -> None:
        """Begin to load one device's part. All parts of a command load at the same time."""
        device = self._device(part.device)
        await self._loop.ask(
            lambda n: Prepare(
                n,
                part.holder,
                command.card,
                command.token,
                command.traceparent,
                command.background,
                device,
                part.layers,
                part.rank,
            )
        )

    def _refuse_stale(self, what: str, token: int) -> None:
        if token >> 32 < self._loop.state.epoch:
            raise StaleToken(f"{what} is from leader epoch {token >> 32}; {self._loop.state.epoch} was seen")

    async def on_node_status(self, status: NodeOutline) -> None:
        """Handle a status of this node's nodeagent."""
        self._shares = any(c.name == WEIGHTS_ON_GPU and c.available for c in status.capabilities)
        known = frozenset(i.instance_id for i in status.instances if i.state is not InstanceState.STOPPED)
        self._loop.dispatch(NodeReported(known))
        if (now := self._loop.clock()) - self._memory_read_at < _MEMORY_READ_EVERY_S:
            return
        self._memory_read_at = now
        if (short := short_of_memory()) > 0:
            self._loop.dispatch(MemoryPressure(short))

    def adopt(self, records: list[WeightsRecord], mapped: tuple[int, ...] = (), ready: int = 0, *, at_once: bool = True) -> None:
        """Adopt the weights of an earlier loader.

        Args:
            records: Complete weights.
            mapped: Chunks without an owner that some process still maps.
            ready: Chunks to populate before a load needs them.
            at_once: Populate them now; else when the loader is idle (`keep_ready`).
        """
        for r in records:
            log.info("adopted weights", extra={"model": r.model, "weights": r.weights_id, "holders": list(r.holders)})
            self._loop.dispatch(
                Adopt(r.weights_id, r.model, r.chunks, r.directory, r.total_bytes, r.holders, r.source, pinned=r.pinned)
            )
        self._loop.dispatch(Adopted(mapped, ready, free_bytes() if at_once else 0))

    async def keep_ready(self) -> None:
        """Populate memory for future loads whenever the loader is idle. Never returns."""
        while True:
            left = self._loop.busy_at + _IDLE_BEFORE_PREPARE_S - self._loop.clock()
            if left <= 0:
                self._loop.dispatch(Idle(free_bytes()))
            await asyncio.sleep(left if left > 0 else _IDLE_BEFORE_PREPARE_S)

    async def audit(self) -> MemoryAudited:
        """Audit the memory of the node's devices."""
        return MemoryAudited(node=self._node, boot_id=self._boot_id, devices=await self._auditor.audit())

    async def keep_audited(self) -> None:
        """Audit device memory after changes. Never returns."""
        await self._auditor.keep_audited()

    def last_busy_at(self) -> float:
        """Return the monotonic seconds of the last moment with a load in progress."""
        return self._loop.busy_at

    @property
    def has_holders(self) -> bool:
        """True if instances hold weights."""
        return any(e.holders for e in self._loop.state.entries.values())

    async def stop(self) -> None:
        """Refuse waiting requests, cancel loads, and wait for both.

        Complete weights stay held or cached.
        """
        await self._prefetching.stop()
        self._loop.dispatch(Stop())
        while not self._loop.state.settled:
            self.changed.clear()
            await self.changed.wait()
        self._inspections.shutdown(wait=False, cancel_futures=True)
        await asyncio.to_thread(self._loop.runs.close)
        await asyncio.to_thread(self._loop.reclaimer.close)

    async def _load_ahead(self, holder: str, card: ModelCard) -> Message:
        return await self._loop.ask(lambda n: Attach(n, holder, card, "complete", None, local=True, background=True))

    def _end_hold(self, holder: str, keep: bool) -> None:
        self._loop.dispatch(Release(self._loop.number(), holder, keep))

    def _measure_prefetch(self, weights_id: str) -> Arrived:
        """Return the bytes of a prefetch: in memory, or on the disk if it is fetched there only."""
        if (written := self._disk_copies.count_bytes(weights_id)) is not None:
            return Arrived(*written)
        entry = self._loop.state.entries.get(weights_id)
        return Arrived(entry.loaded_bytes, entry.total_bytes) if entry is not None else Arrived()

    async def read_file(self, request: ReadModelFile) -> ModelFilePart:
        """Read a part of a small file, for a gateway that counts tokens.

        Raises `NotFound` if this host does not have it.
        """
        return await asyncio.get_running_loop().run_in_executor(self._inspections, read_part, self._sources, request)

    # -- readers without NATS ----------------------------------------------------------------------

    async def hold(self, holder: str, card: ModelCard, *, background: bool, rank: RankOf | None = None) -> WeightsAttached:
        """Attach a connection to weights; returns when their index is written.

        Args:
            rank: Attach to the part of this rank.
        """
        try:
            found = await self._loop.ask(
                lambda n: Attach(n, holder, card, "index", None, local=True, background=background, rank=rank)
            )
        finally:
            self._sources.listed.drop(card.info.revision)
        assert isinstance(found, WeightsAttached)
        return found

    def release_hold(self, holder: str) -> None:
        """End the hold of a closed connection."""
        self._loop.dispatch(Release(self._loop.number(), holder))

    async def watermarks(self, weights_id: str) -> AsyncIterator[int]:
        """Yield the loaded bytes, now and on every change, until the load is complete.

        Raises the load's error.
        """
        run = self._loop.state.entries[weights_id].run
        while True:
            next_change, entry = self._loop.next_change, self._loop.state.entries.get(weights_id)
            if entry is None or entry.run != run or entry.stage is Stage.LEAVING:
                raise ShuttingDown("The load was cancelled. Attach again")
            if entry.error is not None:
                raise from_body(entry.error)
            yield entry.loaded_bytes
            if entry.stage is Stage.COMPLETE:
                return
            await next_change.wait()

    async def follow(self, instance_id: str, weights_id: str) -> AsyncIterator[Sequence[Arrival]]:
        """Yield what arrives of weights where `instance_id` computes, until all is there.

        Raises `NotFound` if the instance has not attached them, or if the device has no units, and
        the error of the load.
        """
        entry, count, arrivals = self._get_held_entry(instance_id, weights_id), 0, None
        run, device = entry.run, device_of(entry, instance_id)
        while True:
            next_change, entry = self._loop.next_change, self._get_held_entry(instance_id, weights_id)
            if entry.run != run or entry.stage is Stage.LEAVING:
                raise ShuttingDown("The load was cancelled. Attach again")
            if entry.error is not None:
                raise from_body(entry.error)
            copies = self._loop.runs.copies
            if copies is not None and (failure := copies.error(run, device)) is not None:
                raise from_body(failure)
            is_complete = has_reached(entry, instance_id, "complete")
            if arrivals is None:
                arrivals = self._arrivals(run, device, entry)
            if arrivals is not None and arrivals.is_unreported:
                raise NotFound(f"{device} has no units: engines use the weights there when all are loaded")
            if arrivals is not None and (found := arrivals.list_after(count)):
                count += len(found)
                yield found
                continue
            if is_complete:
                return
            await _wait_for_first(next_change.wait(), *((arrivals.wait_for_more(count),) if arrivals is not None else ()))

    def export_units(self, ask: SocketMap, pid: int) -> Iterator[tuple[tuple[int, ...], Callable[[], list[int]]]]:
        """Yield units on the GPU of an instance, some at a time.

        The function beside them returns their descriptors for process `pid`, which the caller
        closes. It blocks for a moment.

        Raises:
            NotFound: The instance has not attached the weights, or they are not on a GPU.
        """
        first = 0
        while True:
            entry = self._get_held_entry(ask.instance_id, ask.weights_id)
            device, copies = device_of(entry, ask.instance_id), self._loop.runs.copies
            handle = copies.handle(entry.run, device) if copies is not None else None
            if copies is None or device is None or not isinstance(handle, GpuUnitsHandle):
                raise NotFound(f"The weights of {ask.instance_id} are not on a GPU as units. Attach again")
            if first >= len(handle.units):
                return
            units = tuple(range(first, min(first + _UNITS_AT_ONCE, len(handle.units))))
            yield units, partial(copies.export, entry.run, device, units, pid)
            first += len(units)

    def export_arrived(self, ask: SocketFollow, units: tuple[int, ...], pid: int) -> Callable[[], list[int]]:
        """Return the function that returns descriptors of units that `follow` has yielded.

        As of `export_units`.

        Raises:
            NotFound: The instance does not hold the weights any more.
        """
        entry, copies = self._get_held_entry(ask.instance_id, ask.weights_id), self._loop.runs.copies
        device = device_of(entry, ask.instance_id)
        if copies is None or device is None:
            raise NotFound(f"The weights of {ask.instance_id} are not on a GPU as units. Attach again")
        return partial(copies.export, entry.run, device, units, pid)

    def _arrivals(self, run: int, device: str | None, entry: Entry) -> Arrivals | None:
        runs = self._loop.runs
        if device is not None:
            return runs.copies.arrivals(run, device) if runs.copies is not None else None
        found = runs.arrivals(run)
        if found is None and entry.stage is Stage.COMPLETE:  # loaded by an earlier loader
            found = Arrivals()
            found.add(ByteRange(offset=0, nbytes=entry.total_bytes))
        return found

    def _get_held_entry(self, instance_id: str, weights_id: str) -> Entry:
        entry = self._loop.state.held_by(instance_id)
        if entry is None or entry.weights_id != weights_id:
            raise NotFound(f"Instance {instance_id} has not attached weights {weights_id} here. Attach first")
        return entry

    async def card_of(self, *, weights_id: str | None, source: str | None) -> ModelCard:
        """Return a card to attach with.

        Raises `NotFound` for weights unknown to this node, and the errors of reading the source.
        """
        if source is not None:
            asked = asyncio.get_running_loop().run_in_executor(self._inspections, minimal_card, self._sources, source)
            try:
                return await asyncio.shield(asked)
            except asyncio.CancelledError:
                asked.add_done_callback(self._drop_listing)
                raise
        entry = next((e for e in self._loop.state.entries.values() if e.weights_id == weights_id), None)
        if entry is None:
            raise NotFound(f"This node has no weights {weights_id}. Attach with their source")
        return card_for(entry.source, entry.weights_id, entry.total_bytes)

    def _drop_listing(self, asked: asyncio.Future[ModelCard]) -> None:
        """Drop the listing of a source whose reader disconnected before it was read."""
        if not asked.cancelled() and asked.exception() is None:
            self._sources.listed.drop(asked.result().info.revision)

    def _device(self, wanted: str | None) -> str | None:
        """Return the device to copy weights to.

        None for cpu devices without memory of their own, and for GPUs unless the nodeagent reports
        that engines can map weights there.
        """
        copies = self._loop.runs.copies
        if wanted is None or copies is None:
            return None
        return wanted if copies.is_separate(wanted) or (wanted.startswith("cuda:") and self._shares) else None

    # -- out ---------------------------------------------------------------------------------------

    def status(self, shared: Shared) -> LoaderStatus:
        """Return the loader's status.

        Args:
            shared: Files on this host's disk.
        """
        self.changed.clear()
        if self._expectations is not None:
            self._expectations.expire()
        copies = self._loop.runs.copies
        on_devices = copies.on_devices if copies is not None else lambda _: {}
        status = status_publisher.status(
            self._loop.state, self._loop.records.pool_name, self._node, self._boot_id, shared, on_devices
        )
        memory = status_publisher.memory(copies.pages(), self._auditor.violations) if copies is not None else ()
        speed, links = self._loop.runs.bytes_per_second, self._loop.runs.links()
        pretouch = status_publisher.pretouch(self._pretouch())
        found: dict[str, object] = {"bytes_per_second": speed, "links": links, "memory": memory, "pretouch": pretouch}
        found["prefetches"] = self._prefetching.statuses()
        return status.model_copy(update={**found, "read_bytes": self._loop.runs.read_bytes})


def _only_part(command: PrepareWeights) -> DevicePart:
    """Return the part of an instance on one device."""
    return DevicePart(holder=command.instance_id, device=command.device, layers=command.layers, rank=command.rank)


async def _wait_for_first(*waits: Coroutine[Any, Any, object]) -> None:
    """Return when one of `waits` has."""
    tasks = [asyncio.create_task(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        await end(*tasks)
