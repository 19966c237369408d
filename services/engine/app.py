"""Wires one engine process: attach weights, build, serve."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch

from services.engine.generation.batcher import Batcher
from services.engine.generation.events import Event
from services.engine.loader_client import Weights
from services.engine.lora.cache import Adapters
from services.engine.lora.loader_source import LoaderShelf
from services.engine.lora.prefetch import EarlyAdapters
from services.engine.model import loading
from services.engine.server.migration import Moving
from services.engine.server.serving import Serving
from services.engine.server.suspension import Suspension
from services.engine.settings import EngineSettings
from shared.contracts import subjects
from shared.contracts.base import Done, Message
from shared.contracts.engine import (
    DropAdapter,
    EngineControl,
    EngineStart,
    LoadAdapter,
    ProbeEngine,
    SleepEngine,
    WakeEngine,
)
from shared.contracts.loader import LoaderStatus
from shared.contracts.migration import PrepareResume
from shared.contracts.phases import Phase
from shared.engines.instance_process import InstanceProcess
from shared.errors import EngineFailed, ThawError
from shared.messaging import Mesh
from shared.telemetry.timeline import Timeline

log = logging.getLogger(__name__)
_BOUND = 0.1
"""Progress when the model is bound; the rest, but for the warm-up, is the share of bytes that have arrived."""


class Engine(InstanceProcess):
    """One engine process, from its first report to its last."""

    _serving: Serving
    _moving: Moving

    def __init__(self, settings: EngineSettings, start: EngineStart, stop: asyncio.Event, timeline: Timeline) -> None:
        mesh = Mesh(settings, f"engine-{start.instance_id}")
        self._serving = Serving(mesh)
        self._moving = Moving(self._serving)
        super().__init__(start, stop, timeline, mesh, self._serving, self._moving)
        self._settings = settings
        self._suspension = Suspension(start.instance_id, start.card, self._serving)
        self._compute = ThreadPoolExecutor(1, thread_name_prefix="compute", initializer=self._on_compute_thread)
        self._files = ThreadPoolExecutor(1, thread_name_prefix="files")
        self._batcher: Batcher | None = None
        self._weights = Weights(mesh, start)
        self._adapters: Adapters | None = None
        self._early = EarlyAdapters(self._weights, start.instance_id, start.kv_bytes if start.card.info.task == "generate" else 0)
        self._owner: str | None = None
        self._owner_gone = asyncio.Event()

    def _on_compute_thread(self) -> None:
        if self._settings.engine_threads:
            torch.set_num_threads(self._settings.engine_threads)

    async def run(self) -> int:
        self._mesh.listen(subjects.loader_status(self._start.node), LoaderStatus, self._on_loader)
        return await super().run()

    def _ends(self) -> Mapping[asyncio.Event, ThawError]:
        return {self._owner_gone: EngineFailed("the loader that owns the weights' GPU memory has ended; start again")}

    async def _load(self) -> loading.Computable:
        loop = asyncio.get_running_loop()
        index = await self._weights.attach(self._start.card, self._start.instance_id, "index")
        self._reporter.weights_id = index.weights_id
        directory = Path(index.directory)
        with self._timeline.phase(Phase.INIT):
            files = loop.run_in_executor(self._files, loading.read_files, directory, self._start)
            bound = await loop.run_in_executor(self._compute, loading.bind_early, directory, index, self._start)
            small = await files
        self._reporter.advance(_BOUND, Phase.LOAD)
        attached = await self._weights.attach(self._start.card, self._start.instance_id, "complete")
        self._timeline.absorb(attached.phases)
        if not bound.segment.is_current(attached.segment, attached.extents):
            log.warning("the loader was restarted and has loaded again; binding again")
            bound = await loop.run_in_executor(self._compute, loading.bind_early, directory, attached, self._start)
        self._reporter.advance(0.95, Phase.PROFILE)
        with self._timeline.phase(Phase.PROFILE, copied_parameters=len(bound.copied), packed=int(bound.is_packed)):
            finish = partial(loading.complete, bound, small, self._start, self._settings, attached.handle)
            computable = await loop.run_in_executor(self._compute, finish)
        self._owner = attached.boot_id if attached.handle is not None else None
        self._tokenization = small.tokenization
        return computable

    async def _begin(self) -> None:
        computable = await self._load()
        loop = asyncio.get_running_loop()

        def deliver(events: Sequence[Event]) -> None:
            loop.call_soon_threadsafe(self._serving.on_events, events)

        self._batcher = Batcher(computable.runner, computable.embedder, self._tokenization, computable.limits, deliver)
        if computable.runner is not None:
            bind = partial(loading.bind_adapter, computable)
            shelf = LoaderShelf(self._start.instance_id, self._weights, self._batcher, bind, self._files)
            self._adapters = Adapters(shelf, computable.room, self._start.card.spec.keep_alive, self._reporter.changed)
            self._early.bound(self._adapters)
        self._serving.open(computable.reader, self._batcher, computable.block_bytes, self._adapters)

    async def _until_broken(self) -> ThawError:
        assert self._batcher is not None
        try:
            await asyncio.get_running_loop().run_in_executor(self._compute, self._batcher.run)
        except Exception:  # a process boundary: the clients are told, and the nodeagent starts another engine
            log.exception("the computing thread failed")
        return EngineFailed("the engine's computing thread failed")

    async def _obey(self, command: EngineControl) -> Message:
        match command:
            case LoadAdapter(card=card):
                self._early.load(card)
            case DropAdapter(name=name):
                self._early.drop(name)
                if self._adapters is not None:
                    self._adapters.drop(name)
            case SleepEngine(level=level):
                return await self._suspension.sleep(level)
            case WakeEngine():
                return await self._suspension.wake()
            case ProbeEngine():
                return await self._suspension.probe()
            case PrepareResume():
                return await self._moving.prepare(command)
        return Done()

    async def _on_loader(self, status: LoaderStatus) -> None:
        self._weights.loader_heard()
        if self._owner is not None and (status.stopping or status.boot_id != self._owner):
            self._owner_gone.set()
        for segment in status.segments:
            if segment.weights_id == self._reporter.weights_id and segment.total_bytes and self._reporter.phase is Phase.LOAD:
                self._reporter.advance(_BOUND + 0.8 * segment.loaded_bytes / segment.total_bytes, Phase.LOAD)

    async def _end_engine(self) -> None:
        if self._batcher is not None:
            self._batcher.stop()
        self._serving.close()
        self._files.shutdown(wait=False, cancel_futures=True)
        self._compute.shutdown(wait=False, cancel_futures=True)


async def run_engine(settings: EngineSettings, stop: asyncio.Event, start: EngineStart, born: float) -> int:
    """Serve `start` until told to stop; the exit status. `born`: when this process began, in seconds of the monotonic clock."""
    timeline = Timeline("engine")
    timeline.add(Phase.LIBRARIES, born, time.monotonic())
    return await Engine(settings, start, stop, timeline).run()
