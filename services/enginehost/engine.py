"""One engine from its start to its end: launched, waited for, probed, put to sleep; its failure told in its own words."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import secrets
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from services.enginehost.drivers.port import Command, Driver, Launch
from services.enginehost.drivers.probe_response import said
from services.enginehost.drivers.registry import driver_of
from services.enginehost.http1 import Address, Client, HttpError
from services.enginehost.runtimes.container import start_container
from services.enginehost.runtimes.endpoint import (
    ALONE,
    CONTAINER_DIRECTORY,
    LOOPBACK,
    ON_LOOPBACK,
    Reach,
    choose_container_reach,
    choose_reach,
)
from services.enginehost.runtimes.port import Activity, Ended, Running
from services.enginehost.runtimes.process import EngineProcess, free_port
from services.enginehost.runtimes.spare import Spare
from services.enginehost.settings import HostSettings
from shared.contracts.engine import EngineStart, HostedEngine
from shared.contracts.phases import Phase
from shared.enginelog import log_tail
from shared.engines.status_reporter import StatusReporter
from shared.environment import REFERENCE, referenced
from shared.errors import EngineFailed, EngineKilled
from shared.processes import mark_of
from shared.telemetry.timeline import Timeline

log = logging.getLogger(__name__)
_PORT_ATTEMPTS = 3
_POLL_S = 0.05
_LOOK_S = 1.0
_END_SHOWS_S = 1.0
_FIND_S = 2.0
_UP = 0.9
"""Progress when the engine's health is good; below it stands for signs of life, of which nobody knows how many there will be."""
_HALFWAY_SIGNS = 30.0
_PROBE_WITHIN_S = 60.0


class PortTaken(Exception):
    """Someone else listens where the engine was to."""


class Engine:
    """`driver` and `client` are there once it has been started."""

    def __init__(
        self, settings: HostSettings, start: EngineStart, timeline: Timeline, reporter: StatusReporter, spare: Spare | None = None
    ) -> None:
        """`spare`: an interpreter in waiting, which becomes the engine if it can."""
        self._settings = settings
        self._start = start
        self._timeline = timeline
        self._reporter = reporter
        self._spare = spare
        self._running: Running | None = None
        self._reach = ON_LOOPBACK
        self._given_up: asyncio.Future[EngineFailed] = asyncio.get_running_loop().create_future()
        self._expected: str | None = None
        self._signs = 0
        self._pids: tuple[int, ...] = ()
        reporter.hosted = self.hosted
        self.driver: Driver
        self.client: Client

    @property
    def _spec_grace(self) -> float:
        """What the engine has before SIGKILL: the nodeagent gives this host `kill_grace`, and the engine has to be gone before that."""
        return 0.6 * self._settings.kill_grace

    # Start

    async def start(self) -> None:
        """Until it has generated a token. Raises `EngineFailed`, or what the driver refuses the model with."""
        limit = self._start.card.spec.ready_timeout
        try:
            async with asyncio.timeout(limit):
                await self._start_somewhere()
                await self.driver.prepare(self.client, self._on_prepare_progress)
                self._reporter.advance(0.97, Phase.PROFILE)
                with self._timeline.phase(Phase.PROFILE):
                    await self._first_token()
                await self._find_processes()  # what it has forked by now is told with `ready`
                if self._running is not None:
                    await asyncio.to_thread(self._running.note_shared)
        except TimeoutError as e:
            raise EngineFailed(f"the engine was not ready within ready_timeout ({limit:g} s){self._last_words()}") from e

    async def _start_somewhere(self) -> None:
        for attempt in range(1, _PORT_ATTEMPTS + 1):
            try:
                with self._timeline.phase(Phase.INIT, engine=self._start.card.spec.engine, attempt=attempt):
                    await self._launch()
                    await self._until_healthy()
                return
            except PortTaken as e:
                log.warning("the engine's port was taken; trying another", extra={"error": str(e), "attempt": attempt})
                await self.stop()
        raise EngineFailed(f"the engine found its port taken {_PORT_ATTEMPTS} times in a row")

    async def _launch(self) -> None:
        start, spec = self._start, self._start.card.spec
        container = spec.container
        launch = Launch(
            card=start.card,
            device=start.device,
            kv_bytes=start.kv_bytes,
            host="0.0.0.0" if container is not None else LOOPBACK,
            port=container.port if container is not None else free_port(LOOPBACK),
            key=secrets.token_urlsafe(24),
            settings=self._settings,
            threads=int(os.environ.get("THAW_ENGINE_THREADS", "0") or 0),
            devices=start.devices,
        )
        reach = await asyncio.to_thread(self._choose_reach, launch)
        if reach.is_engines:
            inside = f"{CONTAINER_DIRECTORY}/{reach.socket.name}" if reach.socket is not None else ""
            launch = replace(launch, socket=str(reach.socket) if container is None else inside)
        launch = replace(launch, is_private=reach.is_private)
        self._reach = reach
        self.driver = driver_of(launch)
        more = ALONE if reach.has_own_network and container is None else {}
        env = {**_device_environment(launch), **more, **self.driver.environment(), **_expanded(spec.env)}
        if container is not None:
            arguments = tuple(map(launch.fill, container.args)) if container.args is not None else self.driver.arguments()
            self._running = await start_container(launch, container, arguments, env, start, self._settings, self._fetching, reach)
        else:
            argv = tuple(map(launch.fill, spec.command)) or self.driver.command().argv
            self._running = EngineProcess.start(
                Command(argv, env),
                mark_of(self._settings.scope, start.instance_id),
                Address(LOOPBACK, launch.port),
                Path(start.log_path),
                start.cgroup_procs,
                0 if launch.on_cuda else self._settings.engine_niceness,
                self._usable_spare(launch),
                reach,
            )
        self.client = Client(self._running.address, self.driver.headers())

    def _choose_reach(self, launch: Launch) -> Reach:
        driver, container = driver_of(launch), launch.card.spec.container
        if container is not None:
            return choose_container_reach(launch, container, takes_socket=driver.takes_socket)
        return choose_reach(launch, takes_socket=driver.takes_socket, isolates=driver.isolates)

    def _usable_spare(self, launch: Launch) -> Spare | None:
        """It has read the environment: not where the model has one of its own, or what it reads of it differs."""
        spare, self._spare = self._spare, None
        differs = launch.card.spec.env or launch.remote
        if spare is not None and (differs or spare.has_own_network != self._reach.has_own_network):
            spare.close()
            return None
        return spare

    async def was_killed(self) -> bool:
        """Whether it has just been killed from outside: its end shows a moment after its connections have broken."""
        if (running := self._running) is None:
            return False
        try:
            return (await asyncio.wait_for(running.wait(), _END_SHOWS_S)).by_others
        except TimeoutError:
            return False

    async def _until_healthy(self) -> None:
        """However long it takes: whether a start is stuck is the nodeagent's to judge, by the progress that signs of life make."""
        assert self._running is not None
        ended = asyncio.ensure_future(self._running.wait())
        watching = asyncio.create_task(self._tell_signs_of_life(self._running), name="signs of life")
        try:
            while not await self._answers(ended):
                await asyncio.wait({ended}, timeout=_POLL_S)
                if ended.done():
                    await self._explain_end(ended.result())
            if await asyncio.to_thread(self._running.owns_port) is False:
                raise PortTaken(f"another process listens on {self._running.address}")
        finally:
            watching.cancel()
            ended.cancel()
        self._reporter.advance(_UP, Phase.INIT)

    async def _answers(self, ended: asyncio.Future[Ended]) -> bool:
        """Whether it is healthy. Who took its port may take connections and never answer: the engine's end ends the waiting."""
        asking = asyncio.ensure_future(self.driver.healthy(self.client))
        try:
            waited: set[asyncio.Future[Any]] = {asking, ended}
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            return asking.done() and asking.result()
        finally:
            asking.cancel()

    async def _explain_end(self, ended: Ended) -> None:
        words = log_tail(Path(self._start.log_path))
        if re.search(r"address already in use|errno 98|couldn't bind", words, re.IGNORECASE):
            raise PortTaken(words[-200:])
        raise self._died(ended)

    async def _tell_signs_of_life(self, running: Running) -> None:
        """A slow load is no failure: computing, reading and talking are progress, told as a share that comes near its end and never there."""
        before = Activity()
        while True:
            activity = await asyncio.to_thread(running.activity)
            if activity.advanced_from(before):
                self._signs += 1
                self._reporter.advance(_UP * (1 - 2 ** (-self._signs / _HALFWAY_SIGNS)), Phase.INIT)
                before = activity
            await asyncio.sleep(_LOOK_S)

    def _fetching(self, phase: Phase, share: float) -> None:
        """An image on its way: a download is no load, and takes little of the progress that is shown."""
        self._reporter.advance(0.05 * share, phase)

    def _on_prepare_progress(self, phase: Phase, share: float) -> None:
        self._reporter.advance(_UP + 0.06 * share, phase)

    async def _first_token(self) -> None:
        """An open port is a promise; a token is the proof. What it says is kept, to compare with later."""
        assert self._running is not None
        probing = asyncio.ensure_future(self._ask_for_tokens())
        ended = asyncio.ensure_future(self._running.wait())
        try:
            await asyncio.wait({probing, ended}, return_when=asyncio.FIRST_COMPLETED)
            if not probing.done():
                raise self._died(ended.result())
            self._expected = probing.result()
        except EngineFailed as e:
            raise EngineFailed(f"{e.message}{self._last_words()}") from e
        finally:
            probing.cancel()
            ended.cancel()

    # Probes

    async def probe(self) -> tuple[bool, float]:
        """Whether it says the same as at its start, and the milliseconds that took. Raises `EngineFailed` if it says nothing."""
        began = time.monotonic()
        try:
            async with asyncio.timeout(_PROBE_WITHIN_S):
                found = await self._ask_for_tokens()
        except TimeoutError as e:
            raise EngineFailed(f"the engine gave no token within {_PROBE_WITHIN_S:g} s") from e
        return found == self._expected, (time.monotonic() - began) * 1e3

    async def _ask_for_tokens(self) -> str:
        refusal = ""
        for request in self.driver.probes():
            try:
                status, body = await self.client.ask(request)
            except HttpError as e:
                raise EngineFailed(f"the engine gave no token: {e}") from e
            if 200 <= status < 300:
                return said(body)
            refusal = f"{request.path} answered {status}: {body[:300].decode(errors='replace')}"
            if status not in (400, 404, 405, 501):
                break
        raise EngineFailed(f"the engine gave no token: {refusal}")

    # Sleep

    async def sleep(self, level: int) -> None:
        """Raises `UnsupportedParameter` or `EngineFailed`."""
        if level:
            await self.driver.sleep(self.client, level)

    async def wake(self, level: int) -> None:
        if level:
            await self.driver.wake(self.client, level)

    # End

    async def failure(self) -> EngineFailed:
        """Wait until the engine has ended by itself, or was given up; why."""
        assert self._running is not None
        ended = asyncio.ensure_future(self._running.wait())
        try:
            waited: set[asyncio.Future[Any]] = {ended, self._given_up}
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            return self._given_up.result() if self._given_up.done() else self._died(ended.result())
        finally:
            ended.cancel()

    def give_up(self, error: EngineFailed) -> None:
        if not self._given_up.done():
            self._given_up.set_result(error)

    async def stop(self) -> None:
        """End it and all that it forked; harmless if that is done."""
        running, self._running, self._pids = self._running, None, ()
        if running is not None:
            ended = await running.stop(self._start.card.spec.stop_signal, self._spec_grace)
            log.info("the engine has ended", extra={"how": str(ended)})
        self._reach.close()

    def hosted(self) -> HostedEngine | None:
        """What the nodeagent is told of it."""
        if self._running is None:
            return None
        return HostedEngine(pids=self._pids, container=self._running.container, sleep_levels=self.driver.sleep_levels)

    async def find_processes_forever(self) -> None:
        """In a thread, and never because a request has come: it takes milliseconds."""
        while True:
            await self._find_processes()
            await asyncio.sleep(_FIND_S)

    async def _find_processes(self) -> None:
        if (running := self._running) is not None:
            self._pids = await asyncio.to_thread(running.pids)

    def _died(self, ended: Ended) -> EngineFailed:
        words = self._last_words()
        kind = EngineKilled if ended.by_others else EngineFailed
        return kind(f"the engine {ended}{words}{self.driver.not_here(words)}")

    def _last_words(self) -> str:
        words = log_tail(Path(self._start.log_path))
        return f"; the end of its log:\n{words}" if words else f"; its log tells no reason (`thaw logs {self._start.instance_id}`)"


def _device_environment(launch: Launch) -> dict[str, str]:
    """Which devices the engine sees. They are numbered as NVML does; by itself CUDA puts the fastest first."""
    return {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": ",".join(launch.gpus)}


def _expanded(env: dict[str, str]) -> dict[str, str]:
    """${NAME} as the node's own variable of that name; Thaw's own are not given away."""

    known = referenced(env)

    def value(match: re.Match[str]) -> str:
        return os.environ.get(match[1], "") if match[1] in known else ""

    return {key: REFERENCE.sub(value, text) for key, text in env.items()}
