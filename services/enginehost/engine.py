"""The lifecycle of one engine: launch, health, probes, sleep and stop."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import secrets
from dataclasses import replace
from pathlib import Path
from typing import Any

from services.enginehost.drivers.port import PROBE_TOKENS, Command, Driver, Launch, Rank
from services.enginehost.drivers.probe_response import KeptOutput, generated_output
from services.enginehost.drivers.registry import driver_of
from services.enginehost.http1 import Address, Client, HttpError
from services.enginehost.runtimes.container import start_container
from services.enginehost.runtimes.endpoint import (
    CONTAINER_DIRECTORY,
    LOOPBACK,
    LOOPBACK_ENDPOINT,
    LOOPBACK_ENVIRONMENT,
    Endpoint,
    choose_container_endpoint,
    choose_process_endpoint,
)
from services.enginehost.runtimes.port import Activity, EngineExit, Running
from services.enginehost.runtimes.process import EngineProcess
from services.enginehost.runtimes.spare import Spare
from services.enginehost.settings import HostSettings
from shared.contracts.engine import EngineStart, HostedEngine
from shared.contracts.phases import Phase
from shared.enginelog import log_size, log_tail
from shared.engines.status_reporter import StatusReporter
from shared.environment import REFERENCE, find_referenced
from shared.errors import EngineFailed, EngineKilled
from shared.ports import free_port
from shared.processes import mark_of
from shared.telemetry.timeline import Timeline

log = logging.getLogger(__name__)
_PORT_ATTEMPTS = 3
_POLL_S = 0.05
_ACTIVITY_INTERVAL_S = 1.0
_EXIT_VISIBLE_WITHIN_S = 1.0
_PIDS_INTERVAL_S = 2.0
_UP = 0.9
"""Progress when the engine is healthy.

Progress below it is an estimate from the number of observed signs of activity.
"""
_HALFWAY_SIGNS = 30.0
_CHANGE_WITHIN_S = 120.0
"""A change of the model that takes longer counts as failed."""


class PortTaken(Exception):
    """Another process listens on the port that the engine was given."""


class Engine:
    """One engine. `driver` and `client` exist once it has been started."""

    def __init__(
        self, settings: HostSettings, start: EngineStart, timeline: Timeline, reporter: StatusReporter, spare: Spare | None = None
    ) -> None:
        """Create an engine, not started. It uses the spare interpreter if the command matches."""
        self._settings = settings
        self._start = start
        self._timeline = timeline
        self._reporter = reporter
        self._spare = spare
        self._running: Running | None = None
        self._endpoint = LOOPBACK_ENDPOINT
        self._declared_failed: asyncio.Future[EngineFailed] = asyncio.get_running_loop().create_future()
        self._output = KeptOutput()
        self._signs = 0
        self._log_begins_at = 0
        """Bytes of the log that precede the output of the engine's latest start."""
        self._pids: tuple[int, ...] = ()
        self._asleep_before: int | None = None
        self.rank: Rank | None = None
        """Its place among engines of several nodes; set before the start."""
        reporter.hosted = self.describe_processes
        self.driver: Driver
        self.client: Client

    def take_over(self, start: EngineStart, timeline: Timeline, reporter: StatusReporter, asleep: int) -> None:
        """Become the engine of another instance; `start` then changes the model.

        Args:
            start: The instance.
            timeline: Its phases.
            reporter: Its reports.
            asleep: The level at which the engine sleeps.
        """
        self._start, self._timeline, self._reporter = start, timeline, reporter
        self._declared_failed = asyncio.get_running_loop().create_future()
        self._output, self._asleep_before = KeptOutput(), asleep
        self._log_begins_at = 0
        reporter.hosted = self.describe_processes

    @property
    def _spec_grace(self) -> float:
        """Seconds between the stop signal and SIGKILL.

        The nodeagent kills this host after `kill_grace`, and the engine must be gone before that.
        """
        return 0.6 * self._settings.kill_grace

    # Start

    async def start(self) -> None:
        """Start the engine and return once it has generated a token.

        Raises:
            EngineFailed: The engine ended or was not ready in time.
            ThawError: The driver refuses the model.
        """
        limit = self._start.card.spec.ready_timeout
        try:
            async with asyncio.timeout(limit):
                if self._asleep_before is not None and await self._has_changed_model(self._asleep_before):
                    return
                await self._start_somewhere()
                await self.driver.prepare(self.client, self._on_prepare_progress)
                self._reporter.advance(0.97, Phase.PROFILE)
                with self._timeline.phase(Phase.PROFILE):
                    await self._first_token()
                await self._refresh_pids()  # the `ready` report includes the processes that exist by now
                if self._running is not None:
                    await asyncio.to_thread(self._running.record_shared_memory)
        except TimeoutError as e:
            raise EngineFailed(f"The engine was not ready within ready_timeout ({limit:g} s){self._log_excerpt()}") from e

    async def _has_changed_model(self, asleep: int) -> bool:
        """Change the model of the running engine.

        False: it failed, the engine is stopped, and the reason is reported.
        """
        self._asleep_before = None
        try:
            async with asyncio.timeout(_CHANGE_WITHIN_S):
                with self._timeline.phase(Phase.LOAD, way="template"):
                    self._reporter.advance(0.1, Phase.LOAD)
                    await self._change_model(asleep)
                self._reporter.advance(0.97, Phase.PROFILE)
                with self._timeline.phase(Phase.PROFILE):
                    await self._first_token(only=True)
            return True
        except TimeoutError:
            error = EngineFailed(f"The engine did not change its model within {_CHANGE_WITHIN_S:g} s")
        except EngineFailed as e:
            error = e
        log.error("failed to change the model; restarting the engine", extra={"error": error.message})
        self._reporter.fell_back = error.body()
        await self.stop()
        return False

    async def _change_model(self, asleep: int) -> None:
        """Raises `EngineFailed`, also if the engine exits meanwhile."""
        assert self._running is not None
        driver = driver_of(replace(self.driver.launch, card=self._start.card, log=self._start.log_path))
        self._running.take_over(Path(self._start.log_path), self._start.cgroup_procs)
        changing = asyncio.ensure_future(driver.change_model(self.client, asleep))
        ended = asyncio.ensure_future(self._running.wait())
        try:
            await asyncio.wait({changing, ended}, return_when=asyncio.FIRST_COMPLETED)
            if not changing.done():
                raise self._exit_error(ended.result())
            changing.result()
        finally:
            changing.cancel()
            ended.cancel()
        self.driver = driver

    async def _start_somewhere(self) -> None:
        for attempt in range(1, _PORT_ATTEMPTS + 1):
            try:
                with self._timeline.phase(Phase.INIT, engine=self._start.card.spec.engine, attempt=attempt):
                    await self._launch()
                    await self._until_healthy()
                return
            except PortTaken as e:
                log.warning("the engine's port is taken; trying another", extra={"error": str(e), "attempt": attempt})
                await self.stop()
        raise EngineFailed(f"The engine's port was taken {_PORT_ATTEMPTS} times in a row. Start the instance again")

    async def start_later_rank(self, is_served: asyncio.Event) -> None:
        """Start the engine of a rank that answers no requests. Return when `is_served` is set.

        Raises:
            EngineFailed: The engine cannot be started, or has exited before.
        """
        with self._timeline.phase(Phase.INIT, engine=self._start.card.spec.engine, attempt=1):
            await self._launch()
            assert self._running is not None
            ended = asyncio.ensure_future(self._running.wait())
            serving = asyncio.ensure_future(is_served.wait())
            watching = asyncio.create_task(self._report_progress(self._running), name="signs of life")
            try:
                waited: set[asyncio.Future[Any]] = {ended, serving}
                await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
                if not serving.done():
                    raise self._exit_error(ended.result())
            finally:
                for task in (ended, serving, watching):
                    task.cancel()
        await self._refresh_pids()

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
            log=start.log_path,
            rank=self.rank,
        )
        self._log_begins_at = await asyncio.to_thread(log_size, Path(start.log_path))
        endpoint = await asyncio.to_thread(self._choose_endpoint, launch)
        if endpoint.engine_listens:
            inside = f"{CONTAINER_DIRECTORY}/{endpoint.socket.name}" if endpoint.socket is not None else ""
            launch = replace(launch, socket=str(endpoint.socket) if container is None else inside)
        directory = str(endpoint.directory) if endpoint.directory is not None and container is None else ""
        launch = replace(launch, is_private=endpoint.is_private, directory=directory)
        self._endpoint = endpoint
        self.driver = driver_of(launch)
        is_local = endpoint.has_own_network or (self.rank is not None and self.rank.own_address == LOOPBACK)
        more = LOOPBACK_ENVIRONMENT if is_local and container is None else {}
        env = {**_device_environment(launch), **more, **self.driver.environment(), **_expand(spec.env)}
        if container is not None:
            arguments = tuple(map(launch.fill, container.args)) if container.args is not None else self.driver.arguments()
            self._running = await start_container(
                launch, container, arguments, env, start, self._settings, self._on_pull_progress, endpoint
            )
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
                endpoint,
            )
        self.client = Client(self._running.address, self.driver.headers())

    def _choose_endpoint(self, launch: Launch) -> Endpoint:
        driver, container = driver_of(launch), launch.card.spec.container
        if container is not None:
            return choose_container_endpoint(launch, container, takes_socket=driver.takes_socket)
        return choose_process_endpoint(launch, takes_socket=driver.takes_socket, isolates=driver.isolates and launch.rank is None)

    def _usable_spare(self, launch: Launch) -> Spare | None:
        """The spare, if its environment fits the launch.

        It has read the environment already.
        """
        spare, self._spare = self._spare, None
        differs = launch.card.spec.env or launch.remote
        if spare is not None and (differs or spare.has_own_network != self._endpoint.has_own_network):
            spare.close()
            return None
        return spare

    async def was_killed(self) -> bool:
        """True if the engine has just been killed from outside.

        Its connections break a moment before its exit is visible, so this waits for the exit.
        """
        if (running := self._running) is None:
            return False
        try:
            return (await asyncio.wait_for(running.wait(), _EXIT_VISIBLE_WITHIN_S)).was_killed_externally
        except TimeoutError:
            return False

    async def _until_healthy(self) -> None:
        """Wait for the health endpoint, however long it takes.

        The nodeagent judges whether a start is stuck, by the progress that this host reports.
        """
        assert self._running is not None
        ended = asyncio.ensure_future(self._running.wait())
        watching = asyncio.create_task(self._report_progress(self._running), name="signs of life")
        try:
            while not await self._is_healthy(ended):
                await asyncio.wait({ended}, timeout=_POLL_S)
                if ended.done():
                    await self._raise_exit_error(ended.result())
            if await asyncio.to_thread(self._running.owns_port) is False:
                raise PortTaken(f"another process listens on {self._running.address}")
        finally:
            watching.cancel()
            ended.cancel()
        self._reporter.advance(_UP, Phase.INIT)

    async def _is_healthy(self, ended: asyncio.Future[EngineExit]) -> bool:
        """True if the health endpoint answers.

        Another process on the port may accept connections and never answer, so the engine's exit
        ends the wait.
        """
        asking = asyncio.ensure_future(self.driver.is_healthy(self.client))
        try:
            waited: set[asyncio.Future[Any]] = {asking, ended}
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            return asking.done() and asking.result()
        finally:
            asking.cancel()

    async def _raise_exit_error(self, ended: EngineExit) -> None:
        words = self._log_tail()
        if re.search(r"address already in use|errno 98|couldn't bind", words, re.IGNORECASE):
            raise PortTaken(words[-200:])
        raise self._exit_error(ended)

    async def _report_progress(self, running: Running) -> None:
        """Report activity as progress that approaches `_UP` and never reaches it.

        Activity is CPU time, reads and log output.
        """
        before = Activity()
        while True:
            activity = await asyncio.to_thread(running.activity)
            if activity.advanced_from(before):
                self._signs += 1
                self._reporter.advance(_UP * (1 - 2 ** (-self._signs / _HALFWAY_SIGNS)), Phase.INIT)
                before = activity
            await asyncio.sleep(_ACTIVITY_INTERVAL_S)

    def _on_pull_progress(self, phase: Phase, share: float) -> None:
        """Report the download of an image, which takes a small part of the shown progress."""
        self._reporter.advance(0.05 * share, phase)

    def _on_prepare_progress(self, phase: Phase, share: float) -> None:
        self._reporter.advance(_UP + 0.06 * share, phase)

    async def _first_token(self, *, only: bool = False) -> None:
        """Generate tokens, and keep the output for later comparison.

        It proves that the engine works.

        Args:
            only: Generate one token and keep nothing: `keep_output` does, when no request waits.
        """
        assert self._running is not None
        probing = asyncio.ensure_future(generated_output(self.driver, self.client, 1 if only else PROBE_TOKENS))
        ended = asyncio.ensure_future(self._running.wait())
        try:
            waited: set[asyncio.Future[Any]] = {probing, ended}
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            error = probing.exception() if probing.done() else None
            if error is not None:  # a connection breaks a moment before the exit is visible
                await asyncio.wait({ended}, timeout=_EXIT_VISIBLE_WITHIN_S)
            was_answered = isinstance(error, EngineFailed) and not isinstance(error.__cause__, HttpError)
            how = ""
            if ended.done() and (error is not None or not probing.done()):
                if not was_answered or ended.result().was_killed_externally:
                    raise self._exit_error(ended.result())
                how = f"; then it {ended.result()}"  # its answer says why, as vLLM's after an error of its core
            if isinstance(error, EngineFailed):
                raise EngineFailed(f"{error.message}{how}{self._log_excerpt()}") from error
            self._output = KeptOutput(None if only else probing.result())
        finally:
            probing.cancel()
            ended.cancel()

    # Probes

    async def probe(self) -> tuple[bool, float]:
        """Generate tokens.

        Returns:
            Whether the output equals the output that was kept, and the duration in milliseconds.

        Raises:
            EngineFailed: The engine generated no token.
        """
        return await self._output.compare(self.driver, self.client)

    async def keep_output(self) -> None:
        """Keep the output that probes compare with, unless there is one; no request may run.

        Raises:
            EngineFailed: The engine generated no token.
        """
        await self._output.keep(self.driver, self.client)

    # Sleep

    async def sleep(self, level: int) -> None:
        """Put the engine to sleep. Raises `UnsupportedParameter` or `EngineFailed`."""
        if level:
            await self.driver.sleep(self.client, level)

    async def wake(self, level: int) -> None:
        if level:
            await self.driver.wake(self.client, level)

    # End

    async def failure(self) -> EngineFailed:
        """Wait until the engine exits or is declared failed; return the error."""
        assert self._running is not None
        ended = asyncio.ensure_future(self._running.wait())
        try:
            waited: set[asyncio.Future[Any]] = {ended, self._declared_failed}
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            return self._declared_failed.result() if self._declared_failed.done() else self._exit_error(ended.result())
        finally:
            ended.cancel()

    def declare_failed(self, error: EngineFailed) -> None:
        if not self._declared_failed.done():
            self._declared_failed.set_result(error)

    async def stop(self) -> None:
        """Stop the engine and its child processes. Calling it again has no effect."""
        running, self._running, self._pids = self._running, None, ()
        if running is not None:
            ended = await running.stop(self._start.card.spec.stop_signal, self._spec_grace)
            log.info("the engine has exited", extra={"how": str(ended)})
        self._endpoint.close()

    def describe_processes(self) -> HostedEngine | None:
        """The engine's processes and sleep levels, for the status report."""
        if self._running is None:
            return None
        return HostedEngine(pids=self._pids, container=self._running.container, sleep_levels=self.driver.sleep_levels)

    async def refresh_pids_forever(self) -> None:
        """List the engine's processes periodically.

        This runs in a thread, because it takes milliseconds.
        """
        while True:
            await self._refresh_pids()
            await asyncio.sleep(_PIDS_INTERVAL_S)

    async def _refresh_pids(self) -> None:
        if (running := self._running) is not None:
            self._pids = await asyncio.to_thread(running.pids)

    def _exit_error(self, ended: EngineExit) -> EngineFailed:
        words = self._log_excerpt()
        kind = EngineKilled if ended.was_killed_externally else EngineFailed
        return kind(f"The engine {ended}{words}{self.driver.install_hint(words)}")

    def _log_tail(self) -> str:
        """The end of the engine's log, without the output of its earlier starts."""
        return log_tail(Path(self._start.log_path), self._log_begins_at)

    def _log_excerpt(self) -> str:
        words = self._log_tail()
        return f"; the end of its log:\n{words}" if words else f"; its log has no reason (`thaw logs {self._start.instance_id}`)"


def _device_environment(launch: Launch) -> dict[str, str]:
    """Environment variables that select the engine's devices.

    NVML's numbers are used.
    """
    return {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": ",".join(launch.gpus)}


def _expand(env: dict[str, str]) -> dict[str, str]:
    """Replace ${NAME} by the node's variable of that name.

    Thaw's own variables are not passed on.
    """

    known = find_referenced(env)

    def value(match: re.Match[str]) -> str:
        return os.environ.get(match[1], "") if match[1] in known else ""

    return {key: REFERENCE.sub(value, text) for key, text in env.items()}
