"""Wires one engine process: attach weights, build, serve, drain, leave.

The end, in order: no new requests; those that run are answered (or, on a signal, ended with an error); `stopped` is reported; the
subscriptions go; what is still to be sent is sent. A start that fails reports `failed` with its error and ends with status 1.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch
from nats.aio.subscription import Subscription
from nats.errors import Error as NatsError

from services.engine import loading
from services.engine.adapters import Adapters
from services.engine.batcher import Batcher
from services.engine.early import EarlyAdapters
from services.engine.events import Event
from services.engine.moving import Moving
from services.engine.serving import Serving
from services.engine.settings import EngineSettings
from services.engine.shelf import LoaderShelf
from services.engine.suspension import Suspension
from services.engine.weights import Weights
from shared.answering import stopped
from shared.contracts import subjects
from shared.contracts.base import Done, Message
from shared.contracts.engine import (
    ENGINE_CONTROL,
    DrainEngine,
    DropAdapter,
    EngineControl,
    EngineStart,
    LoadAdapter,
    PingEngine,
    ProbeEngine,
    SleepEngine,
    WakeEngine,
)
from shared.contracts.inference import CancelInfer
from shared.contracts.loader import LoaderStatus
from shared.contracts.migration import ForgetResume, ListRequests, PrepareResume, ReadTokens, YieldInfer
from shared.contracts.phases import Phase
from shared.errors import EngineFailed, ThawError
from shared.messaging import Mesh
from shared.reporting import Reporter
from shared.telemetry.timeline import Timeline
from shared.telemetry.tracing import context_of, record_phases

log = logging.getLogger(__name__)
_FLUSH_WITHIN_S = 2.0
_BOUND = 0.1
"""Progress when the model is bound; the rest, but for the warm-up, is the share of bytes that have arrived."""


class Engine:
    """One engine process, from its first report to its last."""

    def __init__(self, settings: EngineSettings, start: EngineStart, stop: asyncio.Event, timeline: Timeline) -> None:
        self._settings = settings
        self._start = start
        self._stop = stop
        self._timeline = timeline
        self._mesh = Mesh(settings, f"engine-{start.instance_id}")
        self._serving = Serving(self._mesh)
        self._moving = Moving(self._serving)
        self._suspension = Suspension(start.instance_id, start.card, self._serving)
        self._reporter = Reporter(self._mesh, start, timeline, self._serving.load)
        self._serving.changed = self._reporter.changed
        self._compute = ThreadPoolExecutor(1, thread_name_prefix="compute", initializer=self._on_compute_thread)
        self._files = ThreadPoolExecutor(1, thread_name_prefix="files")
        self._batcher: Batcher | None = None
        self._requests: Subscription | None = None
        self._connected = False
        self._weights = Weights(self._mesh, start)
        self._adapters: Adapters | None = None
        self._early = EarlyAdapters(self._weights, start.instance_id, start.kv_bytes if start.card.info.task == "generate" else 0)
        self._owner: str | None = None
        self._owner_gone = asyncio.Event()

    def _on_compute_thread(self) -> None:
        if self._settings.engine_threads:
            torch.set_num_threads(self._settings.engine_threads)

    async def run(self) -> int:
        """The exit status."""
        instance = self._start.instance_id
        self._mesh.respond(subjects.engine_control(instance), ENGINE_CONTROL, self._control, concurrent=True)
        self._mesh.listen(subjects.loader_status(self._start.node), LoaderStatus, self._on_loader)
        ending = asyncio.create_task(self._until_ended(), name="end")
        work = asyncio.create_task(self._work(), name="work")
        try:
            await asyncio.wait({ending, work}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                return await self._leave(ending.result())
            return work.result()
        finally:
            for task in (ending, work):
                task.cancel()
            await asyncio.gather(ending, work, return_exceptions=True)
            self._close()

    async def _until_ended(self) -> int:
        """0: told to leave, or drained. 1: the mesh is gone for good, or the loader that owns the weights' memory."""
        names = {
            asyncio.create_task(self._stop.wait()): 0,
            asyncio.create_task(self._mesh.lost.wait()): 1,
            asyncio.create_task(self._owner_gone.wait()): 1,
            asyncio.create_task(self._serving.drained.wait()): 0,
        }
        try:
            done, _ = await asyncio.wait(names, return_when=asyncio.FIRST_COMPLETED)
            return max(names[task] for task in done)
        finally:
            for task in names:
                task.cancel()

    async def _work(self) -> int:
        """Load, then serve until cancelled. Returns only if it failed."""
        await self._mesh.start()
        self._connected = True
        async with asyncio.TaskGroup() as tasks:
            reports = tasks.create_task(self._reporter.publish_forever(), name="reports")
            answers = tasks.create_task(self._serving.publish_forever(), name="answers")
            try:
                return await self._load_and_serve()
            finally:
                reports.cancel()
                answers.cancel()

    async def _load_and_serve(self) -> int:
        try:
            computable = await self._load()
        except ThawError as e:
            return await self._fail(e)
        except Exception as e:  # a process boundary: whatever it was, the nodeagent hears of it
            log.exception("the start failed")
            return await self._fail(EngineFailed(f"{type(e).__name__}: {str(e)[:500]}"))
        return await self._serve(computable)

    async def _fail(self, error: ThawError) -> int:
        log.error("failed", extra={"code": error.code, "error": error.message})
        self._reporter.enter("failed", error=error.body())
        await self._reporter.publish()
        await self._mesh.nc.flush(timeout=int(_FLUSH_WITHIN_S))
        return 1

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
        record_phases(
            (s for s in self._timeline.spans() if s.process == self._timeline.process), context_of(self._start.traceparent)
        )
        return computable

    async def _serve(self, computable: loading.Computable) -> int:
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
        self._requests = await self._mesh.nc.subscribe(subjects.infer(self._start.instance_id), cb=self._serving.on_message)
        await self._mesh.flush(int(_FLUSH_WITHIN_S))
        if not self._serving.draining:
            self._reporter.enter("ready")
        log.info("ready", extra={"instance": self._start.instance_id, "model": self._start.card.name})
        try:
            await loop.run_in_executor(self._compute, self._batcher.run)
        except Exception:  # a process boundary: the clients are told, and the nodeagent starts another engine
            log.exception("the computing thread failed")
        self._serving.abandon(EngineFailed("the computing thread failed"))
        await self._serving.flush()
        return 1

    async def _control(self, command: EngineControl) -> Message:
        match command:
            case PingEngine():
                return self._reporter.report()
            case CancelInfer(request_id=request_id):
                self._serving.cancel(request_id)
            case DrainEngine(only_if_idle=only_if_idle, reason=reason):
                self._serving.drain(only_if_idle=only_if_idle)
                log.info("draining", extra={"reason": reason})
                self._reporter.enter("draining")
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
            case ListRequests():
                return self._moving.list()
            case ReadTokens(request_id=request_id):
                return self._moving.read(request_id)
            case YieldInfer(request_id=request_id):
                self._moving.yield_(request_id)
            case PrepareResume():
                return await self._moving.prepare(command)
            case ForgetResume(prepared=name):
                self._moving.forget(name)
        return Done()

    async def _on_loader(self, status: LoaderStatus) -> None:
        self._weights.loader_heard()
        if self._owner is not None and (status.stopping or status.boot_id != self._owner):
            self._owner_gone.set()
        for segment in status.segments:
            if segment.weights_id == self._reporter.weights_id and segment.total_bytes and self._reporter.phase is Phase.LOAD:
                self._reporter.advance(_BOUND + 0.8 * segment.loaded_bytes / segment.total_bytes, Phase.LOAD)

    async def _leave(self, status: int) -> int:
        self._serving.drain(only_if_idle=False)
        self._serving.abandon(stopped())
        if self._owner_gone.is_set() and not self._mesh.lost.is_set():
            await self._serving.flush()
            return await self._fail(EngineFailed("the loader that owns the weights' GPU memory has ended; start again"))
        if status or not self._connected:
            log.error("left without NATS")
            return status
        self._reporter.enter("stopped")
        try:
            async with asyncio.timeout(_FLUSH_WITHIN_S):
                if self._requests is not None:
                    await self._requests.drain()  # type: ignore[no-untyped-call]  # nats-py gives it no types
                await self._serving.flush()
                await self._reporter.publish()
                await self._mesh.stop()
        except (TimeoutError, OSError, NatsError) as e:
            log.warning("left without having sent everything", extra={"error": repr(e)})
        return status

    def _close(self) -> None:
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
