"""The engine of a stage behind the first one: it computes for the group, and serves no request.

It is ready when its part is loaded and its connections are made. It ends with its group: when the
first stage has stopped, and when a connection to a neighbour is lost (ADR 0068).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import TypeVar

from services.engine.generation.device_loop import DeviceLoop
from services.engine.loader_client import LoaderClient
from services.engine.loader_watch import BOUND, LoaderWatch
from services.engine.model import loading
from services.engine.model.architectures import ModelCache
from services.engine.model.bound_model import bind_model
from services.engine.settings import EngineSettings
from services.engine.stages import ring
from services.engine.stages.booked_pages import BookedPages
from services.engine.stages.connections import Inbound, Outbound
from services.engine.stages.group_loss import GroupLoss
from services.engine.stages.stage_kv import StageKv
from services.engine.stages.stage_receiving import StageReceiving
from services.engine.stages.steps import StageSteps
from shared.contracts.base import Done, Message
from shared.contracts.engine import (
    EngineControl,
    EngineLoad,
    EngineStart,
    ProbeEngine,
    SleepEngine,
    WakeEngine,
)
from shared.contracts.loader import LoaderProgress
from shared.contracts.migration import PrepareResume
from shared.contracts.phases import Phase
from shared.engines.instance_process import InstanceProcess
from shared.engines.later_stage import NoMigration, NoRequests
from shared.errors import CannotSuspend, InstanceBusy, NotFound, ThawError
from shared.messaging import Mesh
from shared.tasks import end
from shared.telemetry.timeline import Timeline

log = logging.getLogger(__name__)
R = TypeVar("R")


class _NoRequests(NoRequests):
    """The load of a later stage is that of the first stage's sequences."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__(mesh)
        self.steps: StageSteps | None = None

    def load(self) -> EngineLoad:
        if self.steps is None:
            return EngineLoad()
        return EngineLoad(active=self.steps.sequences, kv_bytes_used=self.steps.kv_bytes)

    def raise_if_busy(self) -> None:
        if self.steps is not None and self.steps.sequences:
            raise InstanceBusy(f"The group has {self.steps.sequences} sequences")

    def drain(self, *, only_if_idle: bool) -> None:
        """End when the first stage has stopped; at once if the group is not connected yet."""
        if only_if_idle and not self.draining:
            self.raise_if_busy()
        self.draining = True
        if self.steps is None:
            self.drained.set()

    def close_group(self) -> None:
        """End now: the first stage has stopped."""
        self.draining = True
        self.drained.set()


class LaterStage(InstanceProcess):
    """The engine of one later stage."""

    _serving: _NoRequests
    _loop: asyncio.AbstractEventLoop
    _group: GroupLoss

    def __init__(
        self,
        settings: EngineSettings,
        mesh: Mesh,
        compute: DeviceLoop,
        models: ModelCache,
        start: EngineStart,
        stop: asyncio.Event,
        timeline: Timeline,
    ) -> None:
        self._serving = _NoRequests(mesh)
        super().__init__(start, stop, timeline, mesh, self._serving, NoMigration())
        self._settings, self._device_loop, self._models = settings, compute, models
        self._weights = LoaderClient(mesh, start)
        self._connecting: asyncio.Task[ring.Sockets] | None = None
        self._ring: tuple[Inbound, Outbound] | None = None
        self._computing: asyncio.Future[None] | None = None
        self._lease: BookedPages | None = None
        self._kv: StageKv | None = None
        self._receiving: StageReceiving | None = None
        self._loader = LoaderWatch(self._weights, self._reporter)

    def _exit_conditions(self) -> dict[asyncio.Event, ThawError]:
        return self._loader.exit_conditions

    async def _start_engine(self) -> None:
        start, stage = self._start, self._start.stage
        assert stage is not None
        ring.check_start(start, is_shared=False)
        self._loop = asyncio.get_running_loop()
        self._group = GroupLoss()
        self._connecting = asyncio.create_task(ring.connect_ring(self._mesh, stage, self._settings.stage_host), name="stage-ring")
        index = await self._weights.attach(start.card, self._weights.holder, "index")
        self._reporter.weights_id = index.weights_id
        directory = Path(index.directory)
        with self._timeline.phase(Phase.INIT):
            bound = await self._compute(partial(bind_model, directory, index, start, self._models))
        self._reporter.advance(BOUND, Phase.LOAD)
        attached = await self._weights.attach(start.card, self._weights.holder, "complete")
        self._timeline.absorb(attached.phases)
        if start.separate_memory:
            self._lease = BookedPages(start, self._settings.node_state)
            mapped = await loading.map_pages(attached, start, self._weights, self._compute)
            attached = mapped.attached
            mapped.give_to(bound)
            await self._lease.wait()
        if not bound.segment.is_current(attached.segment, attached.extents):
            log.warning("the loader was restarted and has reloaded the weights; binding again")
            bound = await self._compute(partial(bind_model, directory, attached, start, self._models))
        loading.check_device(attached)
        bound.is_partial = attached.loaded_bytes < attached.total_bytes
        self._reporter.advance(0.95, Phase.PROFILE)
        with self._timeline.phase(Phase.PROFILE, copied_parameters=len(bound.copied), packed=1):
            ready = await self._compute(partial(loading.complete_part, bound, start, self._settings, attached.handle))
        self._loader.on_mapped(attached)
        self._ring = ring.open_connections(
            await self._connecting,
            start,
            loading.stage_data_bytes(bound, start, self._settings),
            self._group.report,
            self._device_loop.wake,
        )
        context = start.card.context_length
        steps = StageSteps(ready.part, *self._ring, ready.kv_blocks, context, self._on_closing)
        revision, host = start.card.info.revision, self._settings.stage_host
        steps.kv = self._kv = StageKv(ready.layout, revision, host, steps.held, self._submit)
        outbound = self._ring[1]
        steps.receiving = self._receiving = StageReceiving(
            ready.layout, revision, ready.part.device, self._submit, outbound.put_small
        )
        self._serving.steps = steps
        self._computing = asyncio.wrap_future(self._device_loop.serve(start.instance_id, steps))

    def _submit(self, work: Callable[[], R]) -> Future[R]:
        return self._device_loop.submit(self._start.instance_id, work)

    def _compute(self, work: Callable[[], R]) -> asyncio.Future[R]:
        return asyncio.wrap_future(self._submit(work))

    def _on_closing(self) -> None:
        self._group.expect_end()
        with contextlib.suppress(RuntimeError):  # the loop is closed: the process ends
            self._loop.call_soon_threadsafe(self._serving.close_group)

    async def _wait_for_failure(self) -> ThawError:
        assert self._computing is not None
        return await self._group.wait_for_failure(self._computing)

    async def _handle_command(self, command: EngineControl) -> Message:
        match command:
            case SleepEngine() | WakeEngine():
                raise CannotSuspend("A stage of a group is not suspended. Stop the group")
            case ProbeEngine() | PrepareResume():
                raise NotFound("A later stage of a group serves no requests. Ask its first stage")
        return Done()

    async def on_loader(self, status: LoaderProgress) -> None:
        """Handle a status of the node's loader."""
        self._loader.on_status(status)

    async def _stop_engine(self) -> None:
        if self._kv is not None:
            await self._kv.close()
        if self._receiving is not None:
            self._receiving.close()
        if self._serving.steps is not None:
            self._serving.steps.stop()
        if self._lease is not None:
            self._lease.abandon()
        if self._connecting is not None:
            await end(self._connecting)
        if self._ring is not None:
            await asyncio.to_thread(ring.close_connections, self._ring, is_orderly=False)
