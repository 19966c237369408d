"""Wires one host: starts the engine, waits for a token from it, serves, sleeps and wakes, ends it.

The start: a process or container → its health → whatever the driver has to prepare → a generated token → ready. If the port went to
someone else meanwhile it is tried on another. The end, in order: no new requests; those that run are answered (or, on a signal, ended with an
error); the engine is ended, with all that it forked; `stopped` is reported. The engine's own end at any time is reported as `failed`, with its
last words, and ends the host with status 1.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time

from nats.aio.subscription import Subscription
from nats.errors import Error as NatsError

from services.enginehost.engine import Engine
from services.enginehost.moving import Moving
from services.enginehost.serving import Serving
from services.enginehost.settings import HostSettings
from shared.answering import stopped
from shared.contracts import subjects
from shared.contracts.base import Done, Message
from shared.contracts.engine import (
    ENGINE_CONTROL,
    DrainEngine,
    DropAdapter,
    EngineAsleep,
    EngineControl,
    EngineProbed,
    EngineStart,
    PingEngine,
    ProbeEngine,
    SleepEngine,
    WakeEngine,
)
from shared.contracts.inference import CancelInfer
from shared.contracts.loader import ReleaseWeights, WeightsReleased
from shared.contracts.migration import ForgetResume, ListRequests, PrepareResume, ReadTokens, YieldInfer
from shared.contracts.phases import Phase
from shared.errors import EngineFailed, InstanceDraining, ThawError
from shared.messaging import Mesh
from shared.reporting import Reporter
from shared.telemetry.timeline import Timeline
from shared.telemetry.tracing import context_of, record_phases

log = logging.getLogger(__name__)
_FLUSH_WITHIN_S = 2.0


class Host:
    """One host process, from its first report to its last."""

    def __init__(self, settings: HostSettings, start: EngineStart, stop: asyncio.Event, timeline: Timeline) -> None:
        self._settings = settings
        self._start = start
        self._stop = stop
        self._timeline = timeline
        self._mesh = Mesh(settings, f"enginehost-{start.instance_id}")
        self._serving = Serving(self._mesh)
        self._reporter = Reporter(self._mesh, start, timeline, self._serving.load)
        self._serving.changed = self._reporter.changed
        self._engine = Engine(settings, start, timeline, self._reporter)
        self._moving = Moving(self._serving)
        self._requests: Subscription | None = None
        self._connected = False
        self._asleep: int | None = None
        self._leaving = False
        self._control_lock = asyncio.Lock()

    async def run(self) -> int:
        """The exit status."""
        self._mesh.respond(subjects.engine_control(self._start.instance_id), ENGINE_CONTROL, self._control, concurrent=True)
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
            await self._engine.stop()

    async def _until_ended(self) -> int:
        """0: told to leave, or drained. 1: the mesh is gone for good."""
        names = {
            asyncio.create_task(self._stop.wait()): 0,
            asyncio.create_task(self._mesh.lost.wait()): 1,
            asyncio.create_task(self._serving.drained.wait()): 0,
        }
        try:
            done, _ = await asyncio.wait(names, return_when=asyncio.FIRST_COMPLETED)
            return max(names[task] for task in done)
        finally:
            for task in names:
                task.cancel()

    async def _work(self) -> int:
        """Start, then serve until cancelled. Returns only if it failed."""
        await self._mesh.start()
        self._connected = True
        async with asyncio.TaskGroup() as tasks:
            background = [
                tasks.create_task(self._reporter.publish_forever(), name="reports"),
                tasks.create_task(self._serving.publish_forever(), name="answers"),
                tasks.create_task(self._engine.find_processes_forever(), name="processes"),
            ]
            try:
                return await self._start_and_serve()
            finally:
                for task in background:
                    task.cancel()

    async def _start_and_serve(self) -> int:
        try:
            await self._engine.start()
            error: ThawError = await self._serve()
        except ThawError as e:
            error = e
        except Exception as e:  # a process boundary: whatever it was, the nodeagent hears of it
            log.exception("the engine's host failed")
            error = EngineFailed(f"{type(e).__name__}: {str(e)[:500]}")
        if self._leaving:  # it was ended, and did not fail
            await asyncio.get_running_loop().create_future()
        return await self._fail(error)

    async def _serve(self) -> ThawError:
        """Until the engine ends, or is found not to answer any more; returns why."""
        record_phases(
            (s for s in self._timeline.spans() if s.process == self._timeline.process), context_of(self._start.traceparent)
        )
        self._serving.open(self._engine.driver, self._engine.client)
        self._requests = await self._mesh.nc.subscribe(subjects.infer(self._start.instance_id), cb=self._serving.on_message)
        await self._mesh.nc.flush(timeout=int(_FLUSH_WITHIN_S))
        if not self._serving.draining:
            self._reporter.enter("ready")
        log.info("ready", extra={"instance": self._start.instance_id, "model": self._start.card.name})
        await self._let_weights_go()
        watching = asyncio.create_task(self._watch_health(), name="health")
        try:
            error = await self._engine.failure()
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
        self._serving.abandon(error)
        await self._serving.flush()
        return error

    async def _let_weights_go(self) -> None:
        """What the loader prepared has been copied: two copies need not stay in memory. The nodeagent releases it again at the end."""
        if self._start.card.spec.loads_itself:
            return
        request = ReleaseWeights(instance_id=self._start.instance_id)
        try:
            await self._mesh.request(subjects.loader_command(self._start.node), request, WeightsReleased)
        except ThawError as e:
            log.warning("the loader did not let go of the weights", extra={"error": e.message})

    async def _watch_health(self) -> None:
        """Ask for a token where no request proves the engine; the second silence in a row ends it."""
        interval = self._settings.probe_interval
        missed = 0
        while interval:
            await asyncio.sleep(min(1.0, interval) if missed else max(0.05, interval - self._serving.idle_s))
            if self._serving.idle_s < interval or not self._awake():
                missed = 0
                continue
            error = await self._silence()
            missed = missed + 1 if error is not None else 0
            if error is None:
                await asyncio.sleep(interval)
            elif missed >= 2:
                self._engine.give_up(error)
                return

    async def _silence(self) -> EngineFailed | None:
        """Why an idle engine gives no token; None if it does, or need not."""
        async with self._control_lock:
            if not self._awake():
                return None
            try:
                await self._engine.probe()
            except EngineFailed as e:
                log.warning("the idle engine gives no token", extra={"error": e.message})
                return e
        return None

    def _awake(self) -> bool:
        return self._asleep is None and not self._serving.draining

    async def _fail(self, error: ThawError) -> int:
        log.error("the engine failed", extra={"code": error.code, "error": error.message})
        await self._engine.stop()
        self._reporter.enter("failed", error=error.body())
        await self._reporter.publish()
        with contextlib.suppress(NatsError, OSError):
            await self._mesh.nc.flush(timeout=int(_FLUSH_WITHIN_S))
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
            case SleepEngine(level=level):
                async with self._control_lock:
                    return await self._sleep(level)
            case WakeEngine():
                async with self._control_lock:
                    return await self._wake()
            case ProbeEngine():
                async with self._control_lock:
                    same, took_ms = await self._engine.probe()
                    return EngineProbed(same=same, took_ms=took_ms)
            case ListRequests():
                return self._moving.list()
            case ReadTokens(request_id=request_id):
                return self._moving.read(request_id)
            case YieldInfer(request_id=request_id):
                self._serving.yield_(request_id)
            case PrepareResume():
                return await self._prepare(command)
            case ForgetResume(prepared=name):
                self._moving.forget(name)
            case DropAdapter():
                pass  # it has none
        return Done()

    async def _prepare(self, order: PrepareResume) -> Message:
        if self._serving.draining or self._asleep is not None or self._reporter.state != "ready":
            raise InstanceDraining
        return await self._moving.prepare(order, self._engine.driver, self._engine.client)

    async def _sleep(self, level: int) -> Message:
        if self._reporter.state not in ("ready", "asleep"):
            raise EngineFailed(f"the engine is {self._reporter.state}")
        began = time.monotonic()
        if self._asleep is None:
            self._serving.close()
            self._asleep = 0
        try:
            await self._engine.sleep(level)
        except ThawError:
            if self._asleep == 0 and level:
                await self._serve_again()
            raise
        self._asleep = level
        self._reporter.enter("asleep")
        return EngineAsleep(level=level, took_ms=(time.monotonic() - began) * 1e3)

    async def _wake(self) -> Message:
        if self._asleep is None:
            same, took_ms = await self._engine.probe()
            return EngineProbed(same=same, took_ms=took_ms)
        began = time.monotonic()
        await self._engine.wake(self._asleep)
        woke_ms = (time.monotonic() - began) * 1e3
        same, took_ms = await self._engine.probe()
        if not same:
            raise EngineFailed("the engine woke up and answers otherwise than before it slept")
        await self._serve_again()
        return EngineProbed(same=same, took_ms=took_ms, woke_ms=woke_ms)

    async def _serve_again(self) -> None:
        self._asleep = None
        self._serving.open(self._engine.driver, self._engine.client)
        self._reporter.enter("ready")

    async def _leave(self, status: int) -> int:
        self._leaving = True
        self._serving.drain(only_if_idle=False)
        self._serving.abandon(stopped())
        if status or not self._connected:
            log.error("left without NATS")
            return status
        try:
            async with asyncio.timeout(_FLUSH_WITHIN_S):
                if self._requests is not None:
                    await self._requests.drain()  # type: ignore[no-untyped-call]  # nats-py gives it no types
                await self._serving.flush()
        except (TimeoutError, OSError, NatsError) as e:
            log.warning("left without having sent everything", extra={"error": repr(e)})
        await self._engine.stop()
        self._reporter.enter("stopped")
        with contextlib.suppress(TimeoutError, OSError, NatsError):
            async with asyncio.timeout(_FLUSH_WITHIN_S):
                await self._reporter.publish()
                await self._mesh.stop()
        return status


async def run_host(settings: HostSettings, stop: asyncio.Event, start: EngineStart, born: float) -> int:
    """Serve `start` until told to stop; the exit status. `born`: when this process began, in seconds of the monotonic clock."""
    timeline = Timeline("enginehost")
    timeline.add(Phase.LIBRARIES, born, time.monotonic())
    return await Host(settings, start, stop, timeline).run()
