"""An instance's process, from its first report to its last: what is the same whichever engine is in it or behind it.

The end, in order: no new requests; those that run are answered (or, on a signal, ended with an error); what is still to be sent is sent; the
engine is ended; `stopped` is reported. A start, or an engine, that fails is reported as `failed` with its error, and ends the process with status 1.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Mapping
from typing import Any, Protocol

from nats.aio.subscription import Subscription
from nats.errors import Error as NatsError

from shared.contracts import subjects
from shared.contracts.base import Done, Message
from shared.contracts.engine import ENGINE_CONTROL, DrainEngine, EngineControl, EngineStart, PingEngine
from shared.contracts.inference import CancelInfer
from shared.contracts.migration import ForgetResume, ListRequests, ReadTokens, RequestsListed, TokensRead, YieldInfer
from shared.engines.request_server import Answering, stopped
from shared.engines.status_reporter import Reporter
from shared.errors import EngineFailed, ThawError
from shared.messaging import Mesh
from shared.tasks import end
from shared.telemetry.timeline import Timeline
from shared.telemetry.tracing import context_of, record_phases

log = logging.getLogger(__name__)
_FLUSH_WITHIN_S = 2.0


class Moving(Protocol):
    """What a migrator asks of an instance, but for `PrepareResume`."""

    def list(self) -> RequestsListed: ...
    def read(self, request_id: str) -> TokensRead: ...
    def yield_(self, request_id: str) -> None: ...
    def forget(self, name: str) -> None: ...


class InstanceProcess(ABC):
    def __init__(
        self, start: EngineStart, stop: asyncio.Event, timeline: Timeline, mesh: Mesh, serving: Answering[Any], moving: Moving
    ) -> None:
        self._start = start
        self._stop = stop
        self._timeline = timeline
        self._mesh = mesh
        self._serving = serving
        self._moving = moving
        self._reporter = Reporter(mesh, start, timeline, serving.load)
        serving.changed = self._reporter.changed
        self._requests: Subscription | None = None
        self._connected = False
        self._leaving = False

    # What is each one's own.

    @abstractmethod
    async def _begin(self) -> None:
        """Until requests can be served. Raises whatever it fails of."""

    @abstractmethod
    async def _until_broken(self) -> ThawError:
        """While requests are served: until that is not possible any more; why."""

    @abstractmethod
    async def _obey(self, command: EngineControl) -> Message:
        """A command that is not the same for all."""

    @abstractmethod
    async def _end_engine(self) -> None:
        """End what computes; harmless if that is done."""

    def _background(self) -> Mapping[str, Coroutine[Any, Any, None]]:
        """Tasks of its own by name, for as long as it runs."""
        return {}

    def _ends(self) -> Mapping[asyncio.Event, ThawError]:
        """More that ends it, and what is reported then."""
        return {}

    # What is the same.

    async def run(self) -> int:
        """The exit status."""
        instance = self._start.instance_id
        self._mesh.respond(subjects.engine_control(instance), ENGINE_CONTROL, self._control, concurrent=True)
        ending = asyncio.create_task(self._until_ended(), name="end")
        work = asyncio.create_task(self._work(), name="work")
        try:
            await asyncio.wait({ending, work}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                return await self._leave(ending.result())
            return work.result()
        finally:
            await end(ending, work, again_s=3.0)
            await self._end_engine()

    async def _until_ended(self) -> int | ThawError:
        """0: told to leave, or drained. 1: the mesh is gone for good."""
        ends: dict[asyncio.Event, int | ThawError] = {self._mesh.lost: 1, **self._ends(), self._stop: 0, self._serving.drained: 0}
        waiting = [asyncio.create_task(event.wait()) for event in ends]
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            return next(how for event, how in ends.items() if event.is_set())
        finally:
            for task in waiting:
                task.cancel()

    async def _work(self) -> int:
        """Start, then serve until cancelled. Returns only if it failed."""
        await self._mesh.start()
        self._connected = True
        async with asyncio.TaskGroup() as tasks:
            always = {"reports": self._reporter.publish_forever(), "answers": self._serving.publish_forever(), **self._background()}
            background = [tasks.create_task(work, name=name) for name, work in always.items()]
            try:
                return await self._start_and_serve()
            finally:
                await end(*background)

    async def _start_and_serve(self) -> int:
        try:
            await self._begin()
            await self._take_requests()
            error = await self._until_broken()
            self._serving.abandon(error)
            await self._serving.flush()
        except ThawError as e:
            error = e
        except Exception as e:  # a process boundary: whatever it was, the nodeagent hears of it
            log.exception("it failed")
            error = EngineFailed(f"{type(e).__name__}: {str(e)[:500]}")
        if self._leaving:  # it was ended, and did not fail
            await asyncio.get_running_loop().create_future()
        return await self._fail(error)

    async def _take_requests(self) -> None:
        record_phases(
            (s for s in self._timeline.spans() if s.process == self._timeline.process), context_of(self._start.traceparent)
        )
        self._requests = await self._mesh.nc.subscribe(subjects.infer(self._start.instance_id), cb=self._serving.on_message)
        await self._mesh.flush(int(_FLUSH_WITHIN_S))
        if not self._serving.draining:
            self._reporter.enter("ready")
        log.info("ready", extra={"instance": self._start.instance_id, "model": self._start.card.name})

    async def _fail(self, error: ThawError) -> int:
        log.error("failed", extra={"code": error.code, "error": error.message})
        await self._end_engine()
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
            case ListRequests():
                return self._moving.list()
            case ReadTokens(request_id=request_id):
                return self._moving.read(request_id)
            case YieldInfer(request_id=request_id):
                self._moving.yield_(request_id)
            case ForgetResume(prepared=name):
                self._moving.forget(name)
            case _:
                return await self._obey(command)
        return Done()

    async def _leave(self, how: int | ThawError) -> int:
        self._leaving = True
        self._serving.drain(only_if_idle=False)
        self._serving.abandon(stopped())
        if isinstance(how, ThawError):
            await self._serving.flush()
            return await self._fail(how)
        if how or not self._connected:
            log.error("left without NATS")
            return how
        try:
            async with asyncio.timeout(_FLUSH_WITHIN_S):
                if self._requests is not None:
                    await self._requests.drain()  # type: ignore[no-untyped-call]  # nats-py gives it no types
                await self._serving.flush()
        except (TimeoutError, OSError, NatsError) as e:
            log.warning("left without having sent everything", extra={"error": repr(e)})
        await self._end_engine()
        self._reporter.enter("stopped")
        with contextlib.suppress(TimeoutError, OSError, NatsError):
            async with asyncio.timeout(_FLUSH_WITHIN_S):
                await self._reporter.publish()
                await self._mesh.stop()
        return 0
