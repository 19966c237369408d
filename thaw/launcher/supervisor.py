"""Keep a one-machine mesh running: `python -m thaw.launcher.supervisor`.

`thaw up` starts the supervisor. It starts the servers, then every service at once, and restarts
services that crash or hang. On SIGTERM or SIGINT it stops everything in order (gateway, nodeagents
with their engines, loaders, scheduler, PostgreSQL, NATS), then ends remaining processes and frees
the shared memory. The services of a killed supervisor keep running, and the next supervisor adopts
them. `lifecycle` makes the decisions.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import logging
import os
import signal
import sys
import time

from thaw.errors import CommandError
from thaw.launcher.home import Home, write_private
from thaw.launcher.leftovers import forget, running_postgres, sweep
from thaw.launcher.lifecycle import (
    Abort,
    Event,
    Exited,
    Finished,
    Hung,
    Kill,
    Launch,
    Mesh,
    Ready,
    StopRequested,
    Terminate,
    Tick,
    decide,
)
from thaw.launcher.listeners import VARIABLE, Listeners
from thaw.launcher.logfiles import bound_logs
from thaw.launcher.plan import MeshPlan, read_plan
from thaw.launcher.probes import until_ready
from thaw.launcher.processes import MARK, Identity, descendants, identify
from thaw.launcher.servers import Postgres, locate_postgres, prepare_postgres, write_nats_config
from thaw.launcher.services import Program, common_environment, programs_of
from thaw.launcher.stale_locks import remove_stale_locks
from thaw.launcher.starting import Starter, Wait, until_gone
from thaw.launcher.status import MeshStatus, ServiceStatus, read_status
from thaw.launcher.survivors import find_survivors
from thaw.launcher.watching import OBSERVE_INTERVAL_S, Watcher, limits_of

log = logging.getLogger("thaw.supervisor")
_LOG_CHECK_S = 30.0
_PATIENCE = 3
"""Failures in a row after which those who connect are refused rather than kept waiting for the next
start.
"""


class Supervisor:
    """Carries out what `lifecycle.decide` says.

    Args:
        programs: The programs to run.
        survivors: Processes of a supervisor that was killed, by name.
        watcher: Finds those that hang.
        starter: Starts processes.
        ready_before: Names of the survivors that the killed supervisor knew to be ready.
    """

    def __init__(
        self,
        home: Home,
        programs: tuple[Program, ...],
        survivors: dict[str, Identity],
        watcher: Watcher,
        starter: Starter,
        ready_before: frozenset[str] = frozenset(),
    ) -> None:
        self._home = home
        self._programs = {p.name: p for p in programs}
        self._survivors = survivors
        self._mesh = Mesh.from_services(p.service for p in programs)
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._processes: dict[str, Identity] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._finished = False
        self._listeners = Listeners()
        self._watcher = watcher
        self._starter = starter
        self._ready_before = ready_before
        self._hung_at: dict[str, float] = {}
        self._is_status_stale = False
        """The last status could not be written."""

    async def run(self) -> None:
        """Run until every service has stopped."""
        loop = asyncio.get_running_loop()
        for signum in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(signum, self._events.put_nowait, StopRequested())
        watching = asyncio.create_task(self._find_hung(), name="find hung processes")
        event: Event = Tick()
        while not self._finished:
            await self._apply(event)
            event = await self._next_event()
        for task in (watching, *self._tasks.values()):
            task.cancel()
        self._watcher.close()

    async def _find_hung(self) -> None:
        while True:
            await asyncio.sleep(OBSERVE_INTERVAL_S)
            for hung in self._watcher.find_hung():
                self._events.put_nowait(hung)

    async def _next_event(self) -> Event:
        if self._finished:
            return Tick()
        deadline = self._mesh.next_deadline
        wait = _LOG_CHECK_S if deadline is None else max(0.0, deadline - time.monotonic())
        try:
            return await asyncio.wait_for(self._events.get(), min(wait, _LOG_CHECK_S))
        except TimeoutError:
            bound_logs(self._home)
            return Tick()

    async def _apply(self, event: Event) -> None:
        if isinstance(event, Exited):
            self._processes.pop(event.name, None)
            self._watcher.forget(event.name)
            if not self._mesh.stopping:
                log.warning("%s ended with status %s", event.name, event.returncode)
        elif isinstance(event, Hung) and not self._mesh.stopping:
            self._hung_at[event.name] = time.time()
            log.warning("%s hangs and is restarted: %s", event.name, event.reason)
        before = self._mesh
        self._mesh, effects = decide(self._mesh, event, time.monotonic())
        if self._mesh.stopping:
            self._listeners.close()
        for effect in effects:
            match effect:
                case Launch(name):
                    await self._launch(self._programs[name])
                case Terminate(name):
                    self._signal(name, self._programs[name].stop_signal)
                case Abort(name):
                    self._signal(name, signal.SIGABRT)
                case Kill(name, group):
                    log.warning("%s does not stop; killing it", name)
                    self._kill(name, group=group)
                case Finished():
                    self._finished = True
        if self._mesh != before or effects or self._is_status_stale:
            self._write_status()

    async def _launch(self, program: Program) -> None:
        try:
            await self._take_over_or_start(program)
        except OSError as e:
            log.error("%s cannot be started: %s", program.name, e)
            self._events.put_nowait(Exited(program.name, None))

    async def _take_over_or_start(self, program: Program) -> None:
        """Raises `OSError` if the process could not be started."""
        heartbeat = self._watcher.prepare(program)
        survivor = self._survivors.pop(program.name, None)
        if survivor is not None and survivor.is_alive():
            log.info("taking over %s (pid %d)", program.name, survivor.pid)
            self._processes[program.name] = survivor
            self._watcher.begin(program, survivor.pid, is_loop_running=program.name in self._ready_before)
            self._watch(program, until_gone(survivor), survived=True)
            return
        if program.prepare is not None:
            await asyncio.to_thread(program.prepare)
        started = await self._starter.start(program, heartbeat, self._name_socket(program))
        identity = identify(started.pid)
        if identity is not None:
            self._processes[program.name] = identity
            self._write_status()  # at once: this supervisor may be killed while it launches the others
        self._watcher.begin(program, started.pid)
        log.info("started %s (pid %d)", program.name, started.pid)
        self._watch(program, started.wait)

    def _name_socket(self, program: Program) -> dict[str, str]:
        """Return the variable that names a process's socket, if it has one."""
        if program.listens is None:
            return {}
        if self._mesh.services[program.name].failures > _PATIENCE:
            self._listeners.close()
            return {}
        listener = self._listeners.at(*program.listens)
        return {VARIABLE: str(listener.fileno())} if listener is not None else {}

    def _watch(self, program: Program, wait: Wait, *, survived: bool = False) -> None:
        following = self._follow(program, wait, survived=survived)
        self._tasks[program.name] = asyncio.create_task(following, name=f"follow {program.name}")

    async def _follow(self, program: Program, wait: Wait, *, survived: bool) -> None:
        """Report when the process answers, and when it has exited."""
        probe = asyncio.create_task(self._watch_ready(program, survived=survived), name=f"probe {program.name}")
        try:
            returncode = await wait()
        finally:
            probe.cancel()
        self._events.put_nowait(Exited(program.name, returncode))

    async def _watch_ready(self, program: Program, *, survived: bool) -> None:
        if program.port is not None:
            await until_ready(program.name, program.port)
        elif not survived:  # a survivor was ready before, and may be of a version that does not report it
            await self._watcher.until_ready(program.name)
        self._events.put_nowait(Ready(program.name))

    def _signal(self, name: str, signum: signal.Signals, *, group: bool = False) -> None:
        process = self._processes.get(name)
        if process is None or not process.is_alive():
            return
        process.send(signum, group=group)

    def _kill(self, name: str, *, group: bool) -> None:
        """Kill a process, and a server's children with it.

        PostgreSQL does not start while a backend of its predecessor lives, stopped or not.
        """
        process, is_server = self._processes.get(name), self._programs[name].port is not None
        children = descendants(process) if process is not None and is_server else []
        self._signal(name, signal.SIGKILL, group=group)
        for child in children:
            child.send(signal.SIGKILL)

    def _write_status(self) -> None:
        services = {
            s.name: ServiceStatus(
                status=s.status,
                # A survivor that waits for its turn stays known: this supervisor may be killed too.
                process=self._processes.get(s.name) or self._survivors.get(s.name),
                restarts=s.restarts,
                failures=s.failures,
                last_exit=s.last_exit,
                hangs=s.hangs,
                last_hang=s.last_hang,
                last_hang_at=self._hung_at.get(s.name),
            )
            for s in self._mesh.services.values()
        }
        try:
            _publish_status(self._home, MeshStatus(supervisor=_self(), stopping=self._mesh.stopping, services=services))
            self._is_status_stale = False
        except OSError as e:  # the services run on, and need their supervisor
            log.error("the status cannot be written: %s", e)
            self._is_status_stale = True


def _self() -> Identity:
    identity = identify(os.getpid())
    assert identity is not None, "a process always finds itself"
    return identity


def _publish_status(home: Home, status: MeshStatus) -> None:
    write_private(home.supervisor_file, status.model_dump_json(indent=1))


def _prepare(home: Home, plan: MeshPlan) -> Postgres | None:
    if plan.nats_url is None:
        write_nats_config(home, plan)
    if plan.database_url is not None:
        return None
    postgres = locate_postgres(home)
    if running_postgres(home) is None:
        remove_stale_locks(postgres)
        prepare_postgres(postgres, plan)
    return postgres


def main() -> int:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    home = Home.from_environment()
    os.environ[MARK] = "1"  # for all that is started from here on
    with home.lock_file.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log.error("another supervisor runs under %s", home.root)
            return 3
        return _supervise(home)


def _supervise(home: Home) -> int:
    before: MeshStatus | None = None
    starter: Starter | None = None
    try:
        before = read_status(home)
        plan = read_plan(home)
        bound_logs(home)
        starter = Starter(home, common_environment(home, plan))
        if before is None or not before.has_survivors:
            starter.prepare()  # it imports while the servers are prepared and start
        postgres = _prepare(home, plan)
        programs = programs_of(home, plan, postgres)
        survivors = find_survivors(home, programs, before)
        limits = limits_of({**os.environ, **plan.environment})
    except CommandError as e:
        log.error("%s %s", e.what, e.remedy)
        if starter is not None:
            starter.close()
        # Survivors stay known, for the next supervisor to adopt.
        services = {} if before is None else before.services
        _publish_status(home, MeshStatus(supervisor=_self(), stopping=True, error=e.what, remedy=e.remedy, services=services))
        return 1
    write_private(home.endpoints_file, json.dumps(plan.endpoints(), indent=1))
    ready = frozenset(name for name, s in before.services.items() if s.status == "ready") if before else frozenset()
    asyncio.run(Supervisor(home, programs, survivors, Watcher(home, limits), starter, ready).run())
    starter.close()
    left = sweep(home)
    if left:
        log.warning("cleaned up %d processes and %d segments", len(left.processes), len(left.segments))
    with contextlib.suppress(OSError):
        forget(home)
    log.info("stopped")
    return 0


if __name__ == "__main__":
    sys.exit(main())
