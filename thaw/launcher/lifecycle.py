"""Decide which service to start, restart, stop or kill, and when. Pure.

The supervisor passes events to `decide` and carries out the effects that it returns.

waiting ──(all of `starts_after` are ready)──> starting ──Ready──> ready
   starting, ready ──Exited──> backing_off ──(delay over)──> starting
   starting, ready ──Hung──> hung ──(DUMP_S over)──> killed
   hung, killed ──Exited──> backing_off
after StopRequested:
   waiting, backing_off ──> stopped
   starting, ready ──(lower ranks are stopped)──> terminating ──(stop_bound_s over)──> killed
   starting, ready, hung, terminating, killed ──Exited──> stopped
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Literal

FIRST_DELAY_S = 0.2
LONGEST_DELAY_S = 5.0
STEADY_AFTER_S = 10.0
"""Seconds of running after which the failures of earlier processes no longer count."""

DUMP_S = 1.0
"""Seconds that a hung process has to write its stack traces before it is killed."""

Status = Literal["waiting", "starting", "ready", "hung", "backing_off", "terminating", "killed", "stopped"]
RUNNING: frozenset[Status] = frozenset({"starting", "ready", "hung", "terminating", "killed"})


@dataclass(frozen=True)
class Service:
    """State of a service. Seconds are on a monotonic clock.

    Attributes:
        starts_after: Names of the services that must be ready before it starts.
        stop_rank: Services of a lower rank have exited before those of the next get `Terminate`.
        stop_bound_s: Seconds that it has to exit after `Terminate` before it is killed.
        since: Time of the last start or exit.
        deadline: Time at which its status ends: a delay, `DUMP_S` or `stop_bound_s` is over.
        failures: Exits in a row, each within `STEADY_AFTER_S` of its start but the first.
        restarts: Starts after the first one.
        last_exit: Exit status of the last process; None also if it could not be started.
        hangs: Number of times that it hung.
        last_hang: The reason why it was last found to hang.
    """

    name: str
    starts_after: tuple[str, ...] = ()
    stop_rank: int = 0
    stop_bound_s: float = 10.0
    status: Status = "waiting"
    since: float = 0.0
    deadline: float | None = None
    failures: int = 0
    restarts: int = 0
    last_exit: int | None = None
    hangs: int = 0
    last_hang: str | None = None


@dataclass(frozen=True)
class Ready:
    """The service answers its probe, or reported that it is ready."""

    name: str


@dataclass(frozen=True)
class Exited:
    """The process ended.

    Attributes:
        returncode: None: unknown, or the process could not be started.
    """

    name: str
    returncode: int | None


@dataclass(frozen=True)
class Hung:
    """The process lives and makes no progress."""

    name: str
    reason: str


@dataclass(frozen=True)
class StopRequested:
    """Every service shall stop."""


@dataclass(frozen=True)
class Tick:
    """A deadline may be over."""


Event = Ready | Exited | Hung | StopRequested | Tick


@dataclass(frozen=True)
class Launch:
    """Start a service's process."""

    name: str


@dataclass(frozen=True)
class Terminate:
    """Ask a service to stop in order."""

    name: str


@dataclass(frozen=True)
class Abort:
    """Make a hung process write its stack traces and end."""

    name: str


@dataclass(frozen=True)
class Kill:
    """Kill a service.

    Attributes:
        group: Kill its whole process group. False for a hung service: the engines of a nodeagent
            stay alive, and the next nodeagent adopts them.
    """

    name: str
    group: bool = True


@dataclass(frozen=True)
class Finished:
    """Every service has stopped."""


Effect = Launch | Terminate | Abort | Kill | Finished


@dataclass(frozen=True)
class Mesh:
    """The services of a mesh, by name.

    Attributes:
        stopping: All of them shall stop.
    """

    services: dict[str, Service] = field(default_factory=dict)
    stopping: bool = False

    @classmethod
    def from_services(cls, services: Iterable[Service]) -> Mesh:
        return cls({s.name: s for s in services})

    @property
    def next_deadline(self) -> float | None:
        """Return the time at which the next `Tick` is due; None: at no time."""
        return min((s.deadline for s in self.services.values() if s.deadline is not None), default=None)


def delay_after(failures: int) -> float:
    """Seconds before the restart that follows the `failures`-th failure in a row."""
    return min(LONGEST_DELAY_S, FIRST_DELAY_S * 2.0 ** min(failures - 1, 16))


def decide(mesh: Mesh, event: Event, now: float) -> tuple[Mesh, tuple[Effect, ...]]:
    """Return the mesh after `event`, and the effects to carry out.

    Unknown names, and events that do not fit the status of their service, change nothing.
    """
    services = dict(mesh.services)
    stopping = mesh.stopping
    match event:
        case StopRequested():
            stopping = True
        case Ready(name) if name in services and services[name].status == "starting":
            services[name] = replace(services[name], status="ready")
        case Exited(name, returncode) if name in services and services[name].status in RUNNING:
            services[name] = _handle_exit(services[name], returncode, now, stopping)
        case Hung(name, reason) if not stopping and name in services and services[name].status in ("starting", "ready"):
            services[name] = _mark_hung(services[name], reason, now)
            return Mesh(services), (Abort(name),)
        case _:
            pass
    killed = tuple(Kill(s.name, group=False) for s in services.values() if s.status == "hung" and _is_due(s, now))
    services |= {k.name: replace(services[k.name], status="killed", deadline=None) for k in killed}
    after, effects = (_stop if stopping else _start)(Mesh(services, stopping), now)
    return after, (*killed, *effects)


def _is_due(service: Service, now: float) -> bool:
    return service.deadline is not None and service.deadline <= now


def _mark_hung(service: Service, reason: str, now: float) -> Service:
    return replace(service, status="hung", deadline=now + DUMP_S, hangs=service.hangs + 1, last_hang=reason)


def _handle_exit(service: Service, returncode: int | None, now: float, stopping: bool) -> Service:
    if stopping:
        return replace(service, status="stopped", since=now, deadline=None, last_exit=returncode)
    failures = 1 if now - service.since >= STEADY_AFTER_S else service.failures + 1
    return replace(
        service,
        status="backing_off",
        since=now,
        deadline=now + delay_after(failures),
        failures=failures,
        last_exit=returncode,
    )


def _start(mesh: Mesh, now: float) -> tuple[Mesh, tuple[Effect, ...]]:
    services = dict(mesh.services)
    effects: list[Effect] = []
    for service in mesh.services.values():
        is_restart = service.status == "backing_off" and _is_due(service, now)
        is_first = service.status == "waiting" and all(mesh.services[n].status == "ready" for n in service.starts_after)
        if is_restart or is_first:
            restarts = service.restarts + (1 if is_restart else 0)
            services[service.name] = replace(service, status="starting", since=now, deadline=None, restarts=restarts)
            effects.append(Launch(service.name))
    return Mesh(services), tuple(effects)


def _stop(mesh: Mesh, now: float) -> tuple[Mesh, tuple[Effect, ...]]:
    services = {
        name: replace(s, status="stopped", deadline=None) if s.status in ("waiting", "backing_off") else s
        for name, s in mesh.services.items()
    }
    left = [s for s in services.values() if s.status != "stopped"]
    if not left:
        return Mesh(services, True), (Finished(),)
    effects: list[Effect] = []
    rank = min(s.stop_rank for s in left)
    for service in left:
        if service.stop_rank != rank:
            continue
        if service.status in ("starting", "ready"):
            services[service.name] = replace(service, status="terminating", deadline=now + service.stop_bound_s)
            effects.append(Terminate(service.name))
        elif service.status == "terminating" and _is_due(service, now):
            services[service.name] = replace(service, status="killed", deadline=None)
            effects.append(Kill(service.name))
    return Mesh(services, True), tuple(effects)
