"""Start and stop a mesh from outside: `thaw up` and `thaw down` on the supervisor."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

import thaw
from shared.ports import free_port
from thaw.errors import CommandError
from thaw.launcher.home import Home, write_private
from thaw.launcher.leftovers import Leftovers, find_leftovers, forget, sweep
from thaw.launcher.logfiles import tail
from thaw.launcher.plan import MeshPlan, listen_fault, read_plan
from thaw.launcher.processes import MARK, Identity
from thaw.launcher.status import MeshStatus, read_status, running_status

Progress = Callable[[MeshStatus], None]
_POLL_S = 0.05
_START_BOUND_S = 300.0
"""Maximum time of a start. On a slow machine the services of several nodes take minutes; a service
that keeps crashing is reported at once.
"""
_STOP_BOUND_S = 150.0
"""More than the sum of the supervisor's own bounds, which it escalates by itself."""
_CRASHES = 3
"""A service that failed this often in a row while the mesh starts will not start without help."""


@contextlib.contextmanager
def starting(home: Home, waits: Callable[[], None]) -> Iterator[None]:
    """Hold the lock of a start, from the check for a running mesh until the mesh runs.

    A concurrent start (whose `waits` is called) then finds the mesh running, and does not treat its
    processes as leftovers.
    """
    with home.start_lock_file.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waits()
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def launch(home: Home, plan: MeshPlan) -> Identity:
    """Start a supervisor for `plan` in a session of its own.

    Survivors of a killed supervisor are taken over if the plan is theirs, and ended first if not.
    Raises `CommandError` if it does not even start.
    """
    survivors = _find_adoptable(home, plan)
    if survivors is None:
        sweep(home)
        forget(home)
        check_port(plan.host, plan.port)
    plan = survivors or plan
    write_private(home.plan_file, plan.model_dump_json(indent=1))
    with home.log("supervisor").open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "thaw.launcher.supervisor"],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            cwd=home.root,
            env=_environment(home),
            start_new_session=True,
        )
    try:
        return _await_supervisor(home, process)
    except BaseException:  # an interrupt too: no other process knows of this one yet
        process.terminate()
        process.wait(_STOP_BOUND_S)
        raise


def _await_supervisor(home: Home, process: subprocess.Popen[bytes]) -> Identity:
    deadline = time.monotonic() + _START_BOUND_S
    while time.monotonic() < deadline:
        status = read_status(home)
        if status is not None and status.supervisor.pid == process.pid:
            if status.error is not None:
                process.wait()
                if not status.has_survivors:  # the next start adopts them
                    forget(home)
                raise CommandError(status.error, status.remedy, code="start_failed")
            if status.supervisor.is_alive():
                return status.supervisor
        if process.poll() is not None:
            raise CommandError(
                f"The supervisor ended with status {process.returncode}: {_last_words(home, 'supervisor')}",
                f"Its log is {home.log('supervisor')}.",
                code="start_failed",
            )
        time.sleep(_POLL_S)
    raise CommandError(f"The supervisor did not report for {_START_BOUND_S:.0f} s.", f"Its log is {home.log('supervisor')}.")


def _environment(home: Home) -> dict[str, str]:
    source = str(Path(thaw.__file__).resolve().parent.parent)
    inherited = os.environ.get("PYTHONPATH")
    environment = {
        **os.environ,
        "THAW_HOME": str(home.root),
        "PYTHONPATH": source + (f"{os.pathsep}{inherited}" if inherited else ""),
    }
    environment.pop(MARK, None)
    return environment


def check_unused(home: Home, host: str, port: int) -> None:
    """Check first that the endpoint's port is free, or held by our own survivors.

    A survivor counts also if no status names it: `launch` ends such processes.
    """
    status = read_status(home)
    if status is not None and status.has_survivors:
        return
    if (taker := _taker(port)) is None or taker not in {p.pid for p in find_leftovers(home).processes}:
        check_port(host, port)


def has_survivors(home: Home, plan: MeshPlan) -> bool:
    """True if `launch` would take over the processes of a supervisor that was killed."""
    return _find_adoptable(home, plan) is not None


def _find_adoptable(home: Home, plan: MeshPlan) -> MeshPlan | None:
    """Return the plan of the mesh that survived its supervisor.

    None if `plan` differs from it in more than the values chosen at random.
    """
    status = read_status(home)
    if status is None or not status.has_survivors:
        return None
    try:
        before = read_plan(home)
    except (CommandError, ValueError):
        return None
    chosen = plan.model_copy(update={"nats_port": before.nats_port, "postgres_port": before.postgres_port, "nodes": before.nodes})
    same_nodes = [n.name for n in plan.nodes] == [n.name for n in before.nodes]
    return before if same_nodes and chosen == before else None


def check_port(host: str, port: int) -> None:
    """Check that the endpoint can listen.

    Raises:
        CommandError: The port or the address cannot be used; the message says which of them.
    """
    fault = listen_fault(host, port)
    if fault is None:
        return
    if isinstance(fault, socket.gaierror) or fault.errno == errno.EADDRNOTAVAIL:
        raise CommandError(
            f"{host} is not an address of this machine.",
            "Choose 127.0.0.1, or 0.0.0.0 for all its addresses: `thaw up --host` (or mesh.host in thaw.yaml, or THAW_GATEWAY_HOST).",
            code="bad_host",
        )
    if fault.errno == errno.EACCES:
        raise CommandError(
            f"Port {port} on {host} may not be opened by this user.",
            "Choose one over 1023: `thaw up --port` (or mesh.port in thaw.yaml).",
            code="port_forbidden",
        )
    raise CommandError(
        f"Port {port} on {host} is taken{_name_process(_taker(port))}.",
        f"Stop that, or choose another port: `thaw up --port {(other := free_port())}`, "
        f"THAW_GATEWAY_PORT={other}, or mesh.port in thaw.yaml.",
        code="port_taken",
    )


def _taker(port: int) -> int | None:
    """Return a process that listens on `port`; None if there is none that this user may see."""
    try:
        for connection in psutil.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr and connection.laddr.port == port and connection.pid:
                return int(connection.pid)
    except (psutil.Error, OSError):
        pass
    return None


def _name_process(pid: int | None) -> str:
    """Return words that name the process `pid`, for a message; none if it is gone."""
    with contextlib.suppress(psutil.Error):
        if pid is not None:
            return f" by {psutil.Process(pid).name()} (pid {pid})"
    return ""


def await_running(home: Home, supervisor: Identity, progress: Progress) -> MeshStatus:
    """Wait until every service's process runs.

    Args:
        home: The state directory.
        supervisor: The process that starts the services.
        progress: Called with each status.

    Raises:
        CommandError: A service keeps crashing, or the supervisor has ended.
    """
    deadline = time.monotonic() + _START_BOUND_S
    while time.monotonic() < deadline:
        if not supervisor.is_alive():
            raise CommandError(f"The supervisor is gone: {_last_words(home, 'supervisor')}", "`thaw up` starts it again.")
        status = read_status(home)
        if status is not None:
            progress(status)
            check_crashes(home, status)
            if status.stage == "running":
                return status
        time.sleep(_POLL_S)
    raise CommandError(f"The services are not up after {_START_BOUND_S:.0f} s.", f"Look at the logs in {home.logs}.")


def check_crashes(home: Home, status: MeshStatus) -> None:
    """Raises `CommandError` with the last words of a service that keeps crashing."""
    for name, service in status.services.items():
        if service.failures >= _CRASHES:
            raise CommandError(
                f"{name} keeps ending (status {service.last_exit}): {_last_words(home, name)}",
                f"`thaw logs {name}` shows more; `thaw doctor` checks what it needs.",
                code="service_crashes",
            )


def _last_words(home: Home, service: str) -> str:
    lines = [words for line in tail(home.log(service), 20) if (words := line.strip(" |+-"))]  # an exception group's frame
    return lines[-1][:400] if lines else "it left no log"


def await_stopped(status: MeshStatus) -> None:
    """Wait until a supervisor that is stopping has ended.

    Raises `CommandError` if it does not.
    """
    deadline = time.monotonic() + _STOP_BOUND_S
    while status.supervisor.is_alive():
        if time.monotonic() > deadline:
            raise CommandError("The mesh that runs here is stopping and does not end.", "`thaw down` ends it.")
        time.sleep(_POLL_S)


def stop(home: Home, progress: Progress) -> Leftovers:
    """Stop the mesh and clean up after it, also when its supervisor is dead already.

    Returns what had been left behind.
    """
    status = running_status(home)
    if status is not None:
        status.supervisor.send(signal.SIGTERM)
        deadline = time.monotonic() + _STOP_BOUND_S
        while status.supervisor.is_alive() and time.monotonic() < deadline:
            if (now := read_status(home)) is not None:
                progress(now)
            time.sleep(_POLL_S)
        status.supervisor.send(signal.SIGKILL)
    left = sweep(home)
    forget(home)
    return left
