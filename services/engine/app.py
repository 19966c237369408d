"""Wiring of an engine: attach weights, build the model, serve.

An engine is one instance. `ProcessParts` are what it shares with the other engines of its process,
if there are any (`services.engine.executor`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from services.engine.generation.batcher import Batcher
from services.engine.generation.device_loop import DeviceLoop
from services.engine.generation.events import Event
from services.engine.generation.kv_borrowing import KvBorrowing
from services.engine.generation.lora_layers import LoraAdapter
from services.engine.kv_transfer.destination import BatcherStore, KvDestination
from services.engine.kv_transfer.exchange import Destination, KvExchange
from services.engine.kv_transfer.group_destination import GroupDestination
from services.engine.kv_transfer.source import KvSource
from services.engine.later_stage import LaterStage
from services.engine.loader_client import LoaderClient
from services.engine.loader_watch import BOUND, LoaderWatch
from services.engine.lora.loader_source import LoaderLoraSource
from services.engine.lora.prefetch import LoraPrefetcher
from services.engine.lora.room import LoraRoom
from services.engine.model import loading
from services.engine.model.architectures import ModelCache
from services.engine.model.attaching import Attaching
from services.engine.model.bound_model import BoundModel, bind_model
from services.engine.model.gpu_kv import GpuKvMemory
from services.engine.model.model_files import ModelFiles, read_files
from services.engine.model.overlap import Overlap
from services.engine.model.ready_model import ReadyModel
from services.engine.server.migration import EngineMigration
from services.engine.server.serving import Serving
from services.engine.server.suspension import Suspension
from services.engine.settings import EngineSettings
from services.engine.stages import ring as stage_ring
from services.engine.stages.connections import Inbound, Outbound
from services.engine.stages.group_loss import GroupLoss
from shared.contracts import subjects
from shared.contracts.base import Done, Message
from shared.contracts.engine import (
    DropAdapter,
    EngineControl,
    EngineStart,
    HostedEngine,
    LoadAdapter,
    ProbeEngine,
    SleepEngine,
    WakeEngine,
)
from shared.contracts.loader import LoaderProgress, WeightsAttached
from shared.contracts.loader_socket import loader_socket
from shared.contracts.migration import PrepareResume
from shared.contracts.phases import Phase
from shared.engines.adapter_cache import AdapterCache
from shared.engines.charge_page import open_page
from shared.engines.instance_process import InstanceProcess
from shared.errors import MemoryExceeded, ThawError
from shared.messaging import Mesh
from shared.tasks import end
from shared.telemetry.timeline import Timeline
from weights.kv_lease import KvLease

log = logging.getLogger(__name__)
R = TypeVar("R")


def borrows_pages(start: EngineStart) -> bool:
    """True if the KV cache takes its memory from a cpu device's pages (ADR 0056).

    For a GPU, the weights' handle says so.
    """
    return start.separate_memory


@dataclass(frozen=True)
class ProcessParts:
    """The parts of a process that its engines share.

    Attributes:
        mesh: The connection. A dedicated engine opens and closes it itself.
        compute: The computing thread of the device.
        files: Threads for reading files.
        models: The common parts of models.
        is_shared: Other engines compute on the same thread: no step may wait for weights.
    """

    settings: EngineSettings
    mesh: Mesh
    compute: DeviceLoop
    files: ThreadPoolExecutor
    models: ModelCache
    is_shared: bool = False

    def close(self) -> None:
        """End the threads, without waiting for a step in progress."""
        self.files.shutdown(wait=False, cancel_futures=True)
        self.compute.stop()


class Engine(InstanceProcess):
    """The engine of one instance."""

    _serving: Serving
    _migration: EngineMigration
    _group: GroupLoss

    def __init__(
        self,
        parts: ProcessParts,
        start: EngineStart,
        stop: asyncio.Event,
        timeline: Timeline,
        stage_pids: tuple[int, ...] = (),
    ) -> None:
        mesh, settings = parts.mesh, parts.settings
        self._serving = Serving(mesh)
        self._migration = EngineMigration(self._serving)
        super().__init__(start, stop, timeline, mesh, self._serving, self._migration, owns_mesh=not parts.is_shared)
        self._parts = parts
        self._settings = settings
        self._suspension = Suspension(start.instance_id, start.card, self._serving)
        self._files = parts.files
        self._page = open_page(start)
        self._batcher: Batcher | None = None
        self._borrowing: KvBorrowing | None = None
        self._weights = LoaderClient(mesh, start)
        self._adapters: AdapterCache[LoraAdapter] | None = None
        self._prefetcher = LoraPrefetcher(
            self._weights, start.instance_id, start.kv_bytes if start.card.info.task == "generate" else 0
        )
        self._loader = LoaderWatch(self._weights, self._reporter)
        self._memory_exceeded = asyncio.Event()
        self._attaching: Attaching | None = None
        self._overlap: Overlap | None = None
        self._computing: asyncio.Future[None] | None = None
        self._mapped_at: list[tuple[int, int]] = []
        self._jobs: set[Future[Any]] = set()
        if stage_pids:
            self._reporter.hosted = lambda: HostedEngine(pids=stage_pids)
        self._connecting: asyncio.Task[stage_ring.Sockets] | None = None
        self._ring: tuple[Inbound, Outbound] | None = None
        self._exchange: KvExchange | None = None

    def _compute(self, work: Callable[[], R]) -> asyncio.Future[R]:
        """Run `work` on the computing thread, between two steps."""
        return asyncio.wrap_future(self._track(self._parts.compute.submit(self._start.instance_id, work)))

    def _track(self, job: Future[R]) -> Future[R]:
        """Keep a job until it has ended: its result may keep an earlier mapping of the weights."""
        self._jobs.add(job)
        job.add_done_callback(self._jobs.discard)
        return job

    async def _bind(self, attached: WeightsAttached) -> BoundModel:
        """Build the model on the computing thread, while its bytes are still loading."""

        def work() -> BoundModel:
            bound = bind_model(Path(attached.directory), attached, self._start, self._parts.models)
            self._mapped_at = list(bound.addresses())
            return bound

        return await self._compute(work)

    async def _run_on_file_thread(self, work: Callable[[], R]) -> R:
        return await asyncio.wrap_future(self._track(self._files.submit(work)))

    def exceed_memory(self) -> None:
        """End the engine because it uses too much of the process's memory."""
        self._memory_exceeded.set()

    def mapped_ranges(self) -> tuple[tuple[int, int], ...]:
        """Return the addresses at which the engine's weights are mapped: first and end."""
        return tuple(self._mapped_at)

    async def until_detached(self) -> None:
        """Wait until no thread works for this engine. Call it after `run`."""
        jobs = [asyncio.wrap_future(job) for job in list(self._jobs) if not job.done()]
        if jobs:
            await asyncio.wait(jobs)
        self._jobs.clear()

    def take_lease(self) -> KvLease | None:
        """Return the pages that the KV cache has borrowed, for the caller to close.

        Call it after `until_detached`.
        """
        borrowing, self._borrowing = self._borrowing, None
        return borrowing.lease if borrowing is not None else None

    def _exit_conditions(self) -> Mapping[asyncio.Event, ThawError]:
        return {
            **self._loader.exit_conditions,
            self._memory_exceeded: MemoryExceeded(
                f"{self._start.card.name} made its executor use more memory than the instances in it reserve. "
                "The model gets a process of its own"
            ),
        }

    async def _load(self) -> None:
        """Load the weights, and open the engine for requests: if possible while they arrive."""
        if self._attaching is not None:
            await self._attach(self._attaching)
            return
        loop = asyncio.get_running_loop()
        index = await self._weights.attach(self._start.card, self._start.instance_id, "index")
        self._reporter.weights_id = index.weights_id
        ring = self._begin_ring()
        with self._timeline.phase(Phase.INIT):
            read = partial(read_files, Path(index.directory), self._start, self._parts.models)
            files = loop.run_in_executor(self._files, read)
            bound = await self._bind(index)
            small = await files
        self._reporter.advance(BOUND, Phase.LOAD)
        self._tokenization = small.tokenization
        self._overlap = await self._begin_overlap(bound, small, index)
        if self._overlap is not None:
            self._loader.on_mapped(await self._finish_overlap(self._overlap))
            return
        attached = await self._weights.attach(self._start.card, self._start.instance_id, "complete")
        self._timeline.absorb(attached.phases)
        if not bound.segment.is_current(attached.segment, attached.extents):
            log.warning("the loader was restarted and has reloaded the weights; binding again")
            bound = await self._bind(attached)
        loading.check_device(attached)
        bound.is_partial = attached.loaded_bytes < attached.total_bytes
        if self._start.separate_memory:
            mapped = await loading.map_pages(attached, self._start, self._weights, self._compute)
            attached = mapped.attached
            mapped.give_to(bound)
        if ring is not None:
            self._ring = stage_ring.open_connections(
                await ring, self._start, loading.stage_data_bytes(bound, self._start, self._settings), self._group.report
            )
        await self._complete(bound, small, attached)

    def begin_attaching(self) -> None:
        """Begin to load the weights into a process whose other engines compute. `run` follows."""

        def on_index(index: WeightsAttached) -> None:
            self._reporter.weights_id = index.weights_id
            self._reporter.advance(BOUND, Phase.LOAD)

        models, run = self._parts.models, self._run_on_file_thread
        self._attaching = Attaching(self._start, self._weights, models, self._timeline, run, on_index, self._keep_requests)
        self._mapped_at = self._attaching.ranges
        self._attaching.begin()

    async def _attach(self, attaching: Attaching) -> None:
        """Load the weights while other engines of the process compute."""
        if self._start.stage is not None:
            stage_ring.check_start(self._start, is_shared=True)
        if borrows_pages(self._start) and self._start.card.info.task == "generate":
            self._begin_borrowing()
        model = await attaching.load()
        loading.check_isolation(model.attached.handle, is_shared=True)
        await self._complete(model.bound, model.files, model.attached)

    async def _keep_requests(self) -> None:
        """Take requests while the model is bound: its weights are loaded (ADR 0105)."""
        if not self._mesh.nc.is_connected:  # a subscription might be lost
            return
        self._serving.keep_requests()
        await self._accept_requests(is_confirmed=False)
        self._reporter.accept_requests()

    async def _complete(self, bound: BoundModel, small: ModelFiles, attached: WeightsAttached) -> None:
        """Open the engine for requests: all weights are loaded and mapped."""
        self._tokenization = small.tokenization
        self._reporter.advance(0.95, Phase.PROFILE)
        with self._timeline.phase(Phase.PROFILE, copied_parameters=len(bound.copied), packed=int(bound.is_packed)):
            finish = partial(loading.complete, bound, small, self._start, self._settings, attached.handle, self._ring)
            computable = await self._compute(finish)
        self._mapped_at = list(bound.addresses())
        self._loader.on_mapped(attached)
        self._open(computable, self._deliver)

    def _begin_ring(self) -> asyncio.Task[stage_ring.Sockets] | None:
        """Start to connect to the other stages; None: the engine serves alone.

        Raises:
            UnsupportedParameter: The engine cannot be a stage where it runs.
        """
        stage = self._start.stage
        if stage is None:
            return None
        stage_ring.check_start(self._start, is_shared=self._parts.is_shared)
        connecting = stage_ring.connect_ring(self._mesh, stage, self._settings.stage_host)
        self._connecting = asyncio.create_task(connecting, name="stage-ring")
        return self._connecting

    async def _begin_overlap(self, bound: BoundModel, files: ModelFiles, index: WeightsAttached) -> Overlap | None:
        """Open the engine for requests while weights arrive; None if it has to wait for them."""
        if self._parts.is_shared or self._start.stage is not None or not self._mesh.nc.is_connected:  # a subscription might be lost
            return None
        is_here = index.loaded_bytes >= index.total_bytes and not loading.has_own_memory(self._start)
        if is_here or not self._settings.engine_overlap or not loading.can_overlap(bound, self._start):
            return None
        overlap = await Overlap.begin(
            loader_socket(self._settings.node_state), bound, index, self._start, self._weights, self._timeline, self._deliver
        )
        if overlap is None:
            return None
        computable = await self._compute(partial(overlap.make_ready, files, self._settings))
        batcher = self._open(computable, overlap.deliver)
        overlap.serve_with(self._serving, batcher)
        await self._accept_requests()
        self._reporter.accept_requests()
        log.info("accepting requests while weights arrive", extra={"instance": self._start.instance_id})
        return overlap

    async def _finish_overlap(self, overlap: Overlap) -> WeightsAttached:
        """Wait for the load. Raises its error, or that of the computing thread."""
        assert self._computing is not None
        finishing = asyncio.create_task(overlap.finish(), name="load")
        try:
            await asyncio.wait((finishing, self._computing), return_when=asyncio.FIRST_COMPLETED)
            if not finishing.done():
                raise await self._group.wait_for_failure(self._computing)
            return finishing.result()
        finally:
            await end(finishing)

    def _begin_borrowing(self, memory: GpuKvMemory | None = None) -> KvBorrowing:
        """Borrow pages of the device for the KV cache, unless that has begun.

        Args:
            memory: Memory of the pages, on a GPU.
        """
        if self._borrowing is None:
            self._borrowing = KvBorrowing(self._start, self._settings.node_state, memory)
        return self._borrowing

    async def _start_engine(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._group = GroupLoss()
        await self._load()

    def _deliver(self, events: Sequence[Event]) -> None:
        """Pass events of the computing thread on to the event loop."""
        self._loop.call_soon_threadsafe(self._serving.on_events, events)

    def _open(self, computable: ReadyModel, deliver: Callable[[Sequence[Event]], None]) -> Batcher:
        """Start the computing thread, and open the server."""
        slo = self._start.card.spec.slo
        ttft_s = slo.ttft
        if slo.is_set:
            self._serving.follow_objective(slo.percentile)
        self._batcher = Batcher(computable.runner, computable.embedder, self._tokenization, computable.limits, deliver, ttft_s)
        if self._page is not None:
            self._batcher.meters.keep_in(self._page)
            self._serving.keep_meters(self._page)
        if computable.runner is not None and (borrows_pages(self._start) or computable.kv_memory is not None):
            self._begin_borrowing(computable.kv_memory).serve(self._batcher, computable.block_bytes)
        if computable.runner is not None and self._start.stage is None:
            bind = partial(loading.bind_lora, computable)
            source = LoaderLoraSource(self._start.instance_id, self._weights, self._batcher, bind, self._files)
            room = LoraRoom(computable.room, self._batcher.grant)
            self._adapters = AdapterCache(source, room, self._start.card.spec.keep_alive, self._reporter.notify_changed)
            self._prefetcher.on_model_bound(self._adapters)
        if computable.runner is not None:
            revision = self._start.card.info.revision
            kv_source = KvSource(self._batcher, revision, self._settings.stage_host)
            destination: Destination = (
                KvDestination(BatcherStore(self._batcher), revision)
                if self._start.stage is None
                else GroupDestination(self._batcher, revision)
            )
            self._exchange = KvExchange(kv_source, destination)
            self._serving.exchange = self._exchange
            self._migration.open(self._exchange)
        phases = self._timeline.spans()
        self._serving.open(computable.reader, self._batcher, computable.block_bytes, self._adapters, phases)
        serving = self._parts.compute.serve(self._start.instance_id, self._batcher)
        self._track(serving)
        self._computing = asyncio.wrap_future(serving)
        return self._batcher

    async def _wait_for_failure(self) -> ThawError:
        assert self._computing is not None
        if self._overlap is not None:
            self._overlap.release_results()
        return await self._group.wait_for_failure(self._computing)

    async def _handle_command(self, command: EngineControl) -> Message:
        match command:
            case LoadAdapter(card=card) if self._start.stage is None:
                self._prefetcher.load(card)
            case DropAdapter(name=name):
                self._prefetcher.drop(name)
                if self._adapters is not None:
                    self._adapters.drop(name)
            case SleepEngine(level=level):
                return await self._suspension.sleep(level)
            case WakeEngine():
                return await self._suspension.wake()
            case ProbeEngine():
                return await self._suspension.probe()
            case PrepareResume():
                return await self._migration.prepare(command)
        return Done()

    async def on_loader(self, status: LoaderProgress) -> None:
        """Handle a status of the node's loader."""
        self._loader.on_status(status)

    async def _stop_engine(self) -> None:
        await self._prefetcher.close()
        if self._adapters is not None:
            await self._adapters.close()
        if self._exchange is not None:
            await self._exchange.close()
        if self._batcher is not None:
            self._batcher.stop()
        if self._connecting is not None:
            await end(self._connecting)
        if self._ring is not None:
            await asyncio.to_thread(stage_ring.close_connections, self._ring, is_orderly=self._serving.draining)
        if self._attaching is not None:
            await self._attaching.end()
        if self._overlap is not None:
            await self._overlap.close()
        if self._borrowing is not None:
            self._borrowing.abandon()
        self._serving.close()


async def run_engine(
    settings: EngineSettings,
    stop: asyncio.Event,
    start: EngineStart,
    process_start_s: float,
    stage_pids: tuple[int, ...] = (),
) -> int:
    """Serve `start` until a stop signal, and return the exit status.

    Args:
        settings: Settings of the process.
        stop: Set by a stop signal.
        start: The instance to serve.
        process_start_s: Time at which this process started, in seconds of the monotonic clock.
        stage_pids: Processes of the later stages that this process has forked.
    """
    timeline = Timeline("engine")
    timeline.add(Phase.LIBRARIES, process_start_s, time.monotonic())
    files = ThreadPoolExecutor(1, thread_name_prefix="files")
    mesh = Mesh(settings, f"engine-{start.instance_id}")
    parts = ProcessParts(settings, mesh, DeviceLoop(settings.engine_threads), files, ModelCache())
    engine: Engine | LaterStage
    if start.stage is not None and not start.stage.is_first:
        engine = LaterStage(settings, mesh, parts.compute, parts.models, start, stop, timeline)
    else:
        engine = Engine(parts, start, stop, timeline, stage_pids)
    mesh.listen(subjects.loader_status(start.node), LoaderProgress, engine.on_loader)
    try:
        return await engine.run()
    finally:
        parts.close()
