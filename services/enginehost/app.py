"""Wiring of one host: start the engine, serve, sleep, wake and stop.

A start runs a process or container, waits for its health endpoint, runs the driver's preparation,
and generates a token. If another process took the port meanwhile, the host tries another port. When
the engine ends by itself, the host reports `failed` with the end of its log.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from services.enginehost.drivers.port import Rank
from services.enginehost.engine import Engine
from services.enginehost.http1 import HttpError, HttpRequest
from services.enginehost.later_rank import LaterRank
from services.enginehost.lora.adapters import HostedAdapters
from services.enginehost.ranks.head import RankHead, own_address
from services.enginehost.runtimes.endpoint import make_directory
from services.enginehost.runtimes.output import redirect_output
from services.enginehost.runtimes.spare import Spare
from services.enginehost.server.migration import HostMigration
from services.enginehost.server.serving import Serving
from services.enginehost.settings import HostSettings
from shared.contracts import subjects
from shared.contracts.base import Done, Message
from shared.contracts.engine import (
    ChangeModel,
    DropAdapter,
    EngineAsleep,
    EngineControl,
    EngineProbed,
    EngineStart,
    LoadAdapter,
    ProbeEngine,
    SleepEngine,
    WakeEngine,
)
from shared.contracts.loader import FetchModelFiles, ModelFilesFetched, ReleaseWeights, WeightsReleased
from shared.contracts.migration import PrepareResume
from shared.contracts.models import ModelCard
from shared.contracts.phases import Phase
from shared.engines.charge_page import open_page
from shared.engines.instance_process import InstanceProcess
from shared.errors import Conflict, EngineFailed, InstanceDraining, ThawError, UnsupportedParameter
from shared.messaging import Mesh
from shared.telemetry.timeline import Timeline
from shared.template_key import template_key

log = logging.getLogger(__name__)
_HEALTH_WITHIN_S = 5.0


@dataclass(frozen=True)
class Successor:
    """The instance that this process and its engine become.

    Attributes:
        asleep: The level at which the engine sleeps.
    """

    start: EngineStart
    asleep: int


class Host(InstanceProcess):
    """One instance of a host process."""

    _serving: Serving
    _migration: HostMigration

    def __init__(
        self,
        settings: HostSettings,
        start: EngineStart,
        stop: asyncio.Event,
        timeline: Timeline,
        spare: Spare | None,
        predecessor: Host | None = None,
    ) -> None:
        """Create an instance.

        Args:
            settings: Settings of the host process.
            start: The start command.
            stop: Set when the process has to stop.
            timeline: Phases of the start.
            spare: A spare interpreter that the engine may use.
            predecessor: The instance whose engine this one takes over.
        """
        mesh = Mesh(settings, f"enginehost-{start.instance_id}")
        self._serving = Serving(mesh, open_page(start))
        self._migration = HostMigration(self._serving)
        super().__init__(start, stop, timeline, mesh, self._serving, self._migration)
        self._settings = settings
        if predecessor is not None and predecessor.successor is not None:
            self._engine = predecessor.engine
            self._engine.take_over(start, timeline, self._reporter, predecessor.successor.asleep)
        else:
            self._engine = Engine(settings, start, timeline, self._reporter, spare)
        self._serving.was_killed = self._engine.was_killed
        self._serving.is_lost = self._is_lost
        self._sleep_level: int | None = None
        self._control_lock = asyncio.Lock()
        self._predecessor = predecessor
        self.successor: Successor | None = None
        self._ranks: RankHead | None = None
        self._adapters = HostedAdapters(
            self._fetch_files,
            partial(make_directory, settings.node_state),
            start.card.spec.keep_alive,
            self._reporter.notify_changed,
        )

    @property
    def engine(self) -> Engine:
        return self._engine

    def _background(self) -> Mapping[str, Coroutine[Any, Any, None]]:
        return {"processes": self._engine.refresh_pids_forever()}

    async def _start_engine(self) -> None:
        if (stage := self._start.stage) is not None:
            self._ranks = RankHead(self._mesh, stage, self._settings.stage_host)
            await self._ranks.open()
            address = own_address(self._settings.stage_host)
            self._engine.rank = Rank(0, stage.count, address, self._ranks.port, address)
        await self._engine.start()
        if self._ranks is not None:
            self._ranks.announce_ready()
        if self._predecessor is not None:
            await self._predecessor.disconnect()
            self._predecessor = None
        self._serving.adapters = self._adapters.open(self._engine.driver, self._engine.client)
        self._serving.open(self._engine.driver, self._engine.client)

    async def _fetch_files(self, card: ModelCard) -> Path:
        request = FetchModelFiles(card=card)
        fetched = await self._mesh.request(subjects.loader_command(self._start.node), request, ModelFilesFetched)
        return Path(fetched.directory)

    async def _wait_for_failure(self) -> ThawError:
        """Wait until the engine ends or stops answering health probes."""
        await self._release_weights()
        if self._ranks is not None:
            self._ranks.lost.add_done_callback(lambda lost: self._engine.declare_failed(lost.result()))
        watching = asyncio.create_task(self._watch_health(), name="health")
        try:
            return await self._engine.failure()
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)

    async def _is_lost(self) -> bool:
        """Return whether the engine has ended behind its server. It counts as failed then.

        vLLM's server outlives its engine core by some seconds.
        """
        try:
            async with asyncio.timeout(_HEALTH_WITHIN_S):
                status, _ = await self._engine.client.ask(HttpRequest("GET", self._engine.driver.health))
        except TimeoutError:  # it is busy
            return False
        except HttpError:  # its exit is noticed, with the reason
            return True
        if 200 <= status < 300:
            return False
        error = EngineFailed(f"The engine answers requests with errors, and its health probe with status {status}")
        self._engine.declare_failed(error)
        return True

    async def _stop_engine(self) -> None:
        if self._ranks is not None:
            await self._ranks.close(is_orderly=self._serving.draining)
        if self.successor is None:
            await self._engine.stop()
        self._adapters.close()

    async def disconnect(self) -> None:
        """Close the connection of an instance that has handed over its engine."""
        await self._mesh.stop()

    async def _release_weights(self) -> None:
        """Release the loader's weights: the engine has its own copy now.

        The nodeagent releases them again at teardown.
        """
        if self._start.card.spec.loads_itself:
            return
        request = ReleaseWeights(instance_id=self._start.instance_id)
        try:
            await self._mesh.request(subjects.loader_command(self._start.node), request, WeightsReleased)
        except ThawError as e:
            log.warning("failed to release weights", extra={"error": e.message})

    async def _watch_health(self) -> None:
        """Probe an idle engine with a short generation.

        Two failures in a row declare it failed.
        """
        interval = self._settings.probe_interval
        missed = 0
        while interval:
            await asyncio.sleep(min(1.0, interval) if missed else max(0.05, interval - self._serving.idle_s))
            if self._serving.idle_s < interval or not self._is_awake():
                missed = 0
                continue
            error = await self._probe_error()
            missed = missed + 1 if error is not None else 0
            if error is None:
                await asyncio.sleep(interval)
            elif missed >= 2:
                self._engine.declare_failed(error)
                return

    async def _probe_error(self) -> EngineFailed | None:
        """The reason why an idle engine generates no token; None if it does, or is asleep."""
        async with self._control_lock:
            if not self._is_awake():
                return None
            try:
                await self._engine.probe()
            except EngineFailed as e:
                log.warning("the idle engine failed a probe", extra={"error": e.message})
                return e
        return None

    def _is_awake(self) -> bool:
        return self._sleep_level is None and not self._serving.draining

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
            case ChangeModel(start=start):
                async with self._control_lock:
                    return self._hand_over(start)
            case PrepareResume():
                return await self._prepare(command)
            case LoadAdapter(card=card):
                self._adapters.load(card)
            case DropAdapter(name=name):
                self._adapters.drop(name)
        return Done()

    def _hand_over(self, start: EngineStart) -> Message:
        """End this instance; its engine becomes that of `start`.

        Raises:
            Conflict: The models have different template keys.
            EngineFailed: The engine is not ready.
            InstanceBusy: Requests are running.
            UnsupportedParameter: The engine cannot change its model.
        """
        card = self._start.card
        if self._reporter.state not in ("ready", "asleep") or self._serving.draining:
            raise EngineFailed(f"The engine is {self._reporter.state} and cannot change its model now")
        if not self._engine.driver.changes_model:
            raise UnsupportedParameter(f"The engine of {card.name} cannot change its model", param="model")
        if not (key := template_key(card)) or template_key(start.card) != key:
            raise Conflict(f"{start.card.name} and {card.name} differ in more than their weights and tokenizers")
        if self._sleep_level is None:
            self._serving.close()
        log.info("the engine becomes another instance", extra={"instance": start.instance_id, "model": start.card.name})
        self.successor = Successor(start, self._sleep_level or 0)
        self._handed_over.set()
        return Done()

    async def _prepare(self, order: PrepareResume) -> Message:
        if self._serving.draining or self._sleep_level is not None or self._reporter.state != "ready":
            raise InstanceDraining
        return await self._migration.prepare(order, self._engine.driver, self._engine.client)

    async def _sleep(self, level: int) -> Message:
        if self._reporter.state not in ("ready", "asleep"):
            raise EngineFailed(f"The engine is {self._reporter.state} and cannot sleep now. Try again once it is ready")
        began = time.monotonic()
        if self._sleep_level is None:
            self._serving.close()
            try:
                await self._engine.keep_output()
            except BaseException:
                self._serving.open(self._engine.driver, self._engine.client)
                raise
            self._sleep_level = 0
        try:
            await self._engine.sleep(level)
        except ThawError:
            if self._sleep_level == 0 and level:
                await self._resume_serving()
            raise
        except asyncio.CancelledError:  # the deadline: the engine may fall asleep later, and is to be woken
            self._sleep_level = max(self._sleep_level, level)
            self._reporter.enter("asleep")
            raise
        self._sleep_level = level
        self._reporter.enter("asleep")
        return EngineAsleep(level=level, took_ms=(time.monotonic() - began) * 1e3)

    async def _wake(self) -> Message:
        if self._sleep_level is None:
            same, took_ms = await self._engine.probe()
            return EngineProbed(same=same, took_ms=took_ms)
        began = time.monotonic()
        await self._engine.wake(self._sleep_level)
        woke_ms = (time.monotonic() - began) * 1e3
        same, took_ms = await self._engine.probe()
        if not same:
            raise EngineFailed("The engine's output after waking differs from its output before sleeping")
        await self._resume_serving()
        return EngineProbed(same=same, took_ms=took_ms, woke_ms=woke_ms)

    async def _resume_serving(self) -> None:
        self._sleep_level = None
        self._serving.open(self._engine.driver, self._engine.client)
        self._reporter.enter("ready")


async def run_host(
    settings: HostSettings, stop: asyncio.Event, start: EngineStart, started_at_s: float, spare: Spare | None = None
) -> int:
    """Serve `start` until a stop signal, and return the exit status.

    Args:
        settings: Settings of the host.
        stop: Set by a stop signal.
        start: The instance to serve.
        started_at_s: Time at which this process, or a spare's order, started, in seconds of the
            monotonic clock.
        spare: A spare interpreter of the engine.
    """
    timeline = Timeline("enginehost")
    timeline.add(Phase.LIBRARIES, started_at_s, time.monotonic())
    if start.stage is not None and not start.stage.is_first:
        if spare is not None:
            spare.close()
        return await LaterRank(settings, start, stop, timeline).run()
    host = Host(settings, start, stop, timeline, spare)
    status = await host.run()
    while host.successor is not None:
        redirect_output(host.successor.start.log_path)
        host = Host(settings, host.successor.start, stop, Timeline("enginehost"), None, host)
        status = await host.run()
    return status
