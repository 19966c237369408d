"""Wires one host: starts the engine, waits for a token from it, serves, sleeps and wakes, ends it.

The start: a process or container → its health → whatever the driver has to prepare → a generated token → ready. If the port went to
someone else meanwhile it is tried on another. The engine's own end at any time is reported as `failed`, with its last words.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine, Mapping
from typing import Any

from services.enginehost.engine import Engine
from services.enginehost.runtimes.spare import Spare
from services.enginehost.server.migration import HostMigration
from services.enginehost.server.serving import Serving
from services.enginehost.settings import HostSettings
from shared.contracts import subjects
from shared.contracts.base import Done, Message
from shared.contracts.engine import (
    EngineAsleep,
    EngineControl,
    EngineProbed,
    EngineStart,
    ProbeEngine,
    SleepEngine,
    WakeEngine,
)
from shared.contracts.loader import ReleaseWeights, WeightsReleased
from shared.contracts.migration import PrepareResume
from shared.contracts.phases import Phase
from shared.engines.instance_process import InstanceProcess
from shared.errors import EngineFailed, InstanceDraining, ThawError
from shared.messaging import Mesh
from shared.telemetry.timeline import Timeline

log = logging.getLogger(__name__)


class Host(InstanceProcess):
    """One host process, from its first report to its last."""

    _serving: Serving
    _migration: HostMigration

    def __init__(
        self, settings: HostSettings, start: EngineStart, stop: asyncio.Event, timeline: Timeline, spare: Spare | None
    ) -> None:
        mesh = Mesh(settings, f"enginehost-{start.instance_id}")
        self._serving = Serving(mesh)
        self._migration = HostMigration(self._serving)
        super().__init__(start, stop, timeline, mesh, self._serving, self._migration)
        self._settings = settings
        self._engine = Engine(settings, start, timeline, self._reporter, spare)
        self._serving.was_killed = self._engine.was_killed
        self._asleep: int | None = None
        self._control_lock = asyncio.Lock()

    def _background(self) -> Mapping[str, Coroutine[Any, Any, None]]:
        return {"processes": self._engine.find_processes_forever()}

    async def _start_engine(self) -> None:
        await self._engine.start()
        self._serving.open(self._engine.driver, self._engine.client)

    async def _wait_for_failure(self) -> ThawError:
        """Until the engine ends, or is found not to answer any more."""
        await self._let_weights_go()
        watching = asyncio.create_task(self._watch_health(), name="health")
        try:
            return await self._engine.failure()
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)

    async def _stop_engine(self) -> None:
        await self._engine.stop()

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

    async def _handle_command(self, command: EngineControl) -> Message:
        match command:
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
            case PrepareResume():
                return await self._prepare(command)
        return Done()  # adapters: it has none

    async def _prepare(self, order: PrepareResume) -> Message:
        if self._serving.draining or self._asleep is not None or self._reporter.state != "ready":
            raise InstanceDraining
        return await self._migration.prepare(order, self._engine.driver, self._engine.client)

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


async def run_host(settings: HostSettings, stop: asyncio.Event, start: EngineStart, born: float, spare: Spare | None = None) -> int:
    """Serve `start` until told to stop; the exit status. `born`: when this process began, or was told what to start, in seconds of the
    monotonic clock."""
    timeline = Timeline("enginehost")
    timeline.add(Phase.LIBRARIES, born, time.monotonic())
    return await Host(settings, start, stop, timeline, spare).run()
