"""The life of one instance in its process, for every engine.

It lasts from the first status report to the last. The process has one instance, except an executor
of the builtin engine, whose instances share its connection to NATS.

Shutdown order:

1. Refuse new requests.
2. Finish running requests; on a signal, fail them with an error.
3. Send all queued messages.
4. Stop the engine.
5. Report `stopped`.

If the start or the engine fails, the process reports `failed` with the error and exits with status
1.
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
from shared.engines.request_server import RequestServer, stopped_error
from shared.engines.status_reporter import StatusReporter
from shared.errors import EngineFailed, ThawError
from shared.messaging import Mesh
from shared.messaging.responders import Responder
from shared.tasks import end
from shared.telemetry.timeline import Timeline
from shared.telemetry.tracing import context_of, record_phases

log = logging.getLogger(__name__)
_FLUSH_WITHIN_S = 2.0


class RequestMigration(Protocol):
    """The migrator's commands to an instance, except `PrepareResume`."""

    def list(self) -> RequestsListed: ...
    def read(self, request_id: str) -> TokensRead: ...

    async def offer_kv(self, read: TokensRead) -> TokensRead:
        """Add the permission to read the request's keys and values, if they can be sent."""
        ...

    def yield_(self, request_id: str) -> None: ...
    def forget(self, name: str) -> None: ...


class InstanceProcess(ABC):
    """Runs one instance; subclasses supply the engine."""

    def __init__(
        self,
        start: EngineStart,
        stop: asyncio.Event,
        timeline: Timeline,
        mesh: Mesh,
        serving: RequestServer[Any],
        migration: RequestMigration,
        *,
        owns_mesh: bool = True,
    ) -> None:
        """Create the instance.

        Args:
            start: The instance to serve.
            stop: Set when the instance has to end.
            timeline: The phases of its start.
            mesh: The connection to NATS.
            serving: Its requests.
            migration: Its part in migrations.
            owns_mesh: The instance opens and closes the connection; else others use it too.
        """
        self._start = start
        self._stop = stop
        self._timeline = timeline
        self._mesh = mesh
        self._serving = serving
        self._migration = migration
        # The nodeagent knows of an instance in an executor from the answer to its attach.
        self._reporter = StatusReporter(mesh, start, timeline, serving.load, begins_at_once=owns_mesh)
        serving.changed = self._reporter.notify_changed
        self._owns_mesh = owns_mesh
        self._commands: Responder | None = None
        self._requests: Subscription | None = None
        self._reconnects = 0
        self._connected = False
        self._shutting_down = False
        self._handed_over = asyncio.Event()
        """Set when this process has become another instance: this one ends without a report."""

    # Supplied by subclasses.

    @abstractmethod
    async def _start_engine(self) -> None:
        """Start the engine and return once it can serve.

        Any exception makes the start fail.
        """

    @abstractmethod
    async def _wait_for_failure(self) -> ThawError:
        """Wait until the engine can no longer serve, and return the error."""

    @abstractmethod
    async def _handle_command(self, command: EngineControl) -> Message:
        """Handle a command that is specific to this kind of engine."""

    @abstractmethod
    async def _stop_engine(self) -> None:
        """Stop the engine. Calling it again has no effect."""

    def _background(self) -> Mapping[str, Coroutine[Any, Any, None]]:
        """Tasks by name that run as long as the process."""
        return {}

    def _exit_conditions(self) -> Mapping[asyncio.Event, ThawError]:
        """Events that end the process, each with the error to report."""
        return {}

    # Shared by all engines.

    async def run(self) -> int:
        """Run until the process has to exit, and return the exit status."""
        instance = self._start.instance_id
        self._commands = self._mesh.respond(
            subjects.engine_control(instance),
            ENGINE_CONTROL,
            self._control,
            concurrent=True,
            is_temporary=not self._owns_mesh,
        )
        ending = asyncio.create_task(self._wait_for_exit(), name="end")
        work = asyncio.create_task(self._run_engine(), name="work")
        try:
            await asyncio.wait({ending, work}, return_when=asyncio.FIRST_COMPLETED)
            if self._handed_over.is_set():
                await self._end_handed_over()
                return 0
            if not work.done():
                return await self._shut_down(ending.result())
            return work.result()
        finally:
            await end(ending, work, again_s=3.0)
            await self._stop_engine()
            await self._leave()

    async def _leave(self) -> None:
        """Remove the subscriptions from a connection that others use."""
        if self._owns_mesh:
            return
        if self._commands is not None:
            await self._commands.stop()
        if self._requests is not None:
            with contextlib.suppress(NatsError, OSError):
                await self._requests.unsubscribe()

    async def _wait_for_exit(self) -> int | ThawError:
        """Wait for a reason to exit.

        0: a signal or a finished drain; 1: a lost mesh; or an error.
        """
        ends: dict[asyncio.Event, int | ThawError] = {
            self._mesh.lost: 1,
            **self._exit_conditions(),
            self._stop: 0,
            self._serving.drained: 0,
            self._handed_over: 0,
        }
        waiting = [asyncio.create_task(event.wait()) for event in ends]
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            return next(how for event, how in ends.items() if event.is_set())
        finally:
            for task in waiting:
                task.cancel()

    async def _run_engine(self) -> int:
        """Start, then serve until cancelled. Returns only after a failure."""
        if self._owns_mesh:
            await self._mesh.start()
        elif self._commands is not None:
            await self._commands.start()
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
            await self._start_engine()
            await self._become_ready()
            error = await self._wait_for_failure()
            self._serving.fail_all(error)
            await self._serving.flush()
        except ThawError as e:
            error = e
        except Exception as e:  # a process boundary: the nodeagent receives every error
            log.exception("the engine failed")
            error = EngineFailed(f"{type(e).__name__}: {str(e)[:500]}")
        if self._requests is not None and not self._shutting_down:  # the load of an engine with requests failed
            self._serving.fail_all(error)
            await self._serving.flush()
        if self._shutting_down:  # an error caused by the shutdown is not a failure
            await asyncio.get_running_loop().create_future()
        return await self._fail(error)

    async def _accept_requests(self, *, is_confirmed: bool = True) -> None:
        """Take requests from now on: an engine may call it while it still loads.

        Args:
            is_confirmed: Wait until the server has the subscription. What this process reports
                afterwards reaches the server after the subscription in any case.
        """
        self._reconnects = self._mesh.nc.stats["reconnects"]
        self._requests = await self._mesh.nc.subscribe(subjects.infer(self._start.instance_id), cb=self._serving.on_message)
        if is_confirmed:
            await self._mesh.flush(int(_FLUSH_WITHIN_S))

    async def _become_ready(self) -> None:
        record_phases(
            (s for s in self._timeline.spans() if s.process == self._timeline.process), context_of(self._start.traceparent)
        )
        if self._requests is not None and self._mesh.nc.stats["reconnects"] != self._reconnects:
            # A subscription that was made while NATS was unreachable may be lost.
            with contextlib.suppress(NatsError):
                await self._requests.unsubscribe()
            self._requests = None
        if self._requests is None:
            await self._accept_requests()
        if not self._serving.draining:
            self._reporter.enter("ready")
        log.info("ready", extra={"instance": self._start.instance_id, "model": self._start.card.name})

    async def _fail(self, error: ThawError) -> int:
        log.error("failed", extra={"code": error.code, "error": error.message})
        await self._stop_engine()
        self._reporter.enter("failed", error=error.body())
        await self._reporter.publish()
        with contextlib.suppress(NatsError, OSError):
            await self._mesh.flush(int(_FLUSH_WITHIN_S))
        return 1

    async def report_end(self) -> None:
        """Report again, after `run`, that the instance has ended: its last report may be lost."""
        if self._reporter.state not in ("stopped", "failed"):
            self._reporter.enter("failed", error=EngineFailed("The engine ended with an error that it did not report").body())
        await self._reporter.publish()

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
                return self._migration.list()
            case ReadTokens(request_id=request_id, offer_kv=offer_kv):
                read = self._migration.read(request_id)
                return await self._migration.offer_kv(read) if offer_kv else read
            case YieldInfer(request_id=request_id):
                self._migration.yield_(request_id)
            case ForgetResume(prepared=name):
                self._migration.forget(name)
            case _:
                return await self._handle_command(command)
        return Done()

    async def _end_handed_over(self) -> None:
        """Reject what still arrives; the connection stays open until the engine has changed."""
        self._shutting_down = True
        self._serving.drain(only_if_idle=False)
        with contextlib.suppress(TimeoutError, OSError, NatsError):
            async with asyncio.timeout(_FLUSH_WITHIN_S):
                if self._requests is not None:
                    await self._requests.drain()  # type: ignore[no-untyped-call]  # nats-py gives it no types
                await self._serving.flush()

    async def _shut_down(self, how: int | ThawError) -> int:
        self._shutting_down = True
        self._serving.drain(only_if_idle=False)
        self._serving.fail_all(stopped_error())
        if isinstance(how, ThawError):
            await self._serving.flush()
            return await self._fail(how)
        if how or not self._connected:
            log.error("stopped without NATS")
            return how
        try:
            async with asyncio.timeout(_FLUSH_WITHIN_S):
                if self._requests is not None:
                    await self._requests.drain()  # type: ignore[no-untyped-call]  # nats-py gives it no types
                await self._serving.flush()
        except (TimeoutError, OSError, NatsError) as e:
            log.warning("stopped with unsent messages", extra={"error": repr(e)})
        await self._stop_engine()
        self._reporter.enter("stopped")
        with contextlib.suppress(TimeoutError, OSError, NatsError):
            async with asyncio.timeout(_FLUSH_WITHIN_S):
                await self._reporter.publish()
                await (self._mesh.stop() if self._owns_mesh else self._mesh.flush())
        return 0
