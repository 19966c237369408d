"""A whole mesh for fault injection, started by `thaw up`.

Tests kill or stop its processes, and compare its bookings with the actual state.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import psutil

from shared.contracts.models import ModelSpec
from shared.contracts.node import InstanceState
from tests.support.launcher import AWAY, Thaw, command_of, until
from tests.support.stopping import stop
from thaw.cli.demo import budget_for_two
from thaw.demo.models import make_demo_model

MODELS = ("one", "two", "three")
NODEAGENT, LOADER = "nodeagent.node-0", "loader.node-0"


class Victim(Thaw):
    """Three small models on a device that holds two of them."""

    def begin(self, sizes: dict[str, str] | None = None) -> None:
        # Tests stop processes at a step, on a busy machine for longer than the watchdog allows.
        self.environment.setdefault("THAW_WATCHDOG_S", "60")
        self.environment.setdefault("THAW_DRAM_BYTES", "0")  # memory that no instance holds counts as a booking fault
        sizes = sizes or dict.fromkeys(MODELS, "test")
        models = self.home / "models"
        specs = tuple(
            ModelSpec(name=name, source=str(make_demo_model(models / name, size, seed=i)))
            for i, (name, size) in enumerate(sizes.items())
        )
        config = self.home / "thaw.yaml"
        config.write_text(
            f"mesh:\n  port: {self.port}\n  nodes:\n    node-0: {{cpu:0: {budget_for_two(specs)}}}\n"
            "defaults: {keep_alive: -1}\nmodels:\n" + "".join(f"  - {{name: {s.name}, source: {s.source}}}\n" for s in specs)
        )
        self.json("up", "--detach", "--config", str(config))

    # State.

    def live(self) -> list[dict[str, Any]]:
        """Return instances that hold memory."""
        return [i for n in self.cluster()["nodes"] for i in n["instances"] if InstanceState(i["state"]).holds_memory]

    def starting(self, model: str) -> dict[str, Any] | None:
        """Return the starting instance of `model` that has a process."""
        found = [i for i in self.live() if i["model"] == model and InstanceState(i["state"]).starting and i["pids"]]
        return found[0] if found else None

    def await_starting(self, model: str) -> dict[str, Any]:
        """Return the starting instance of `model`, once it has a process."""
        seen: list[dict[str, Any]] = []

        def there() -> bool:
            seen.extend(filter(None, [self.starting(model)]))
            return bool(seen)

        until(there, what=f"an engine of {model} is being started")
        return seen[0]

    def engine(self, model: str) -> int:
        return int(self.instance(model)["pids"][0])

    def engine_logs(self) -> set[str]:
        """Return one log for each engine ever started."""
        return {p.name for p in (self.home / "nodes" / "node-0" / "logs").glob("*.engine.log")}

    # Faults.

    def make_cold(self, model: str) -> None:
        """Put the model to sleep until it is cold.

        A killed gateway's demand may wake the model once more. A leader that has lost its database
        may answer until it notices.
        """

        def is_cold() -> bool:
            status, out = self.inside("sleep", model, "--json")
            assert status == 0 or json.loads(out)["error"]["code"] in AWAY, f"{out}{self.last_words()}"
            return status == 0 and all(i["model"] != model for i in self.live())

        until(is_cold, what=f"{model} is cold")

    # Invariants.

    def assert_settled(self) -> None:
        """Check that booked memory equals used memory.

        Every reservation, engine process and segment belongs to an instance.
        """
        deadline = time.monotonic() + 120
        while faults := self.faults_in_the_books():
            assert time.monotonic() < deadline, f"{faults}{self.last_words()}"
            time.sleep(0.1)

    def faults_in_the_books(self) -> list[str]:
        try:
            nodes = [n for n in self.cluster()["nodes"] if n["alive"]]
        except AssertionError as e:
            return [f"no view of the cluster: {e}"[:300]]
        if not nodes:
            return ["no node is alive"]
        live = [i for n in nodes for i in n["instances"] if InstanceState(i["state"]).holds_memory]
        faults = [f"{i['instance_id']} of {i['model']} is still {i['state']}" for i in live if i["state"] != "ready"]
        for device in (d for n in nodes for d in n["devices"]):
            booked = sum(i["memory"]["reserved"] for i in live)
            if device["reserved_bytes"] != booked:
                faults.append(f"{device['reserved_bytes']} bytes reserved, and {booked} by live instances")
            if device["reserved_bytes"] > device["budget_bytes"]:
                faults.append(f"{device['reserved_bytes']} bytes reserved of {device['budget_bytes']}")
        if faults:
            return faults  # to look at all processes of the machine takes CPU time
        pids = {pid for i in live for pid in i["pids"]}
        engines = {p.pid for p in self.engines()}
        if pids != engines:
            faults.append(f"engine processes {engines}, and {pids} of live instances")
        mapped = mapped_bytes(pids)
        present = self.shared_bytes()
        if mapped != present:
            faults.append(f"{present} bytes of shared memory, and {mapped} mapped by live instances")
        return faults

    def engines(self) -> list[psutil.Process]:
        """Return engine processes, forked or not."""
        return [p for p in self._engine_processes() if not listens(p)]

    def zygotes(self) -> list[psutil.Process]:
        """Return the zygotes.

        A zygote listens on the socket in its command line; its forks do not.
        """
        return [p for p in self._engine_processes() if listens(p)]

    def _engine_processes(self) -> list[psutil.Process]:
        return [p for p in self.processes() if _is_of_engine(command_of(p))]


def listens(process: psutil.Process) -> bool:
    try:
        return any(str(c.laddr).endswith("zygote.sock") for c in process.net_connections(kind="unix"))
    except psutil.Error:
        return False


def _is_of_engine(command: list[str]) -> bool:
    """Return whether a command is that of an engine, of its host, or of a zygote."""
    return any(module in " ".join(command) for module in ("services.engine", "tests.support.paced_zygote"))


def is_engine(process: psutil.Process) -> bool:
    """True for a builtin engine, but not for its zygote or an exited engine."""
    try:
        return _is_of_engine(process.cmdline()) and not process.children() and not listens(process)
    except psutil.Error:
        return False


def mappings(pid: int) -> set[tuple[str, int, int]]:
    """Return a process's mappings of shared memory: file, first byte, end."""
    try:
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    except OSError:
        return set()
    found = set()
    for line in lines:
        if "/dev/shm/thaw-" in line:
            addresses, _, offset, _, _, path = line.split(maxsplit=5)
            low, high = (int(a, 16) for a in addresses.split("-"))
            start = int(offset, 16)
            found.add((Path(path.removesuffix(" (deleted)")).name, start, start + high - low))
    return found


def mapped_bytes(pids: Iterable[int]) -> int:
    """Return the mesh's distinct bytes of shared memory that these processes map."""
    total, name, end = 0, "", 0
    for file, low, high in sorted({m for pid in pids for m in mappings(pid)}):
        end = end if file == name else 0
        total += max(0, high - max(low, end))
        name, end = file, max(end, high)
    return total


def at_rest(pid: int, looks: int = 4) -> bool:
    """True if no thread of a process ran, or could run, in several checks, 10 ms apart.

    The process has done all it could. On a busy machine a thread that can run waits for a core.
    """

    def turns() -> list[str]:
        return [p.read_text().split()[2] for p in Path(f"/proc/{pid}/task").glob("*/schedstat")]

    def can_run() -> bool:
        states = [p.read_text().rpartition(")")[2].split()[0] for p in Path(f"/proc/{pid}/task").glob("*/stat")]
        return any(state in ("R", "D") for state in states)

    try:
        before = turns()
        for _ in range(looks):
            time.sleep(0.01)
            if turns() != before or can_run():
                return False
    except (FileNotFoundError, ProcessLookupError):  # a thread has ended meanwhile
        return False
    return True


def kill(pid: int) -> None:
    """Kill a process and wait until all its threads have ended.

    Its parent may be stopped, and reap it later. While a thread of a dying process waits for a
    child, it still reaps this child, although the process itself is a zombie already.
    """
    process = psutil.Process(pid)
    os.kill(pid, signal.SIGKILL)
    until(lambda: _ended(process), 60, f"process {pid} has ended")


def _ended(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or (process.status() == psutil.STATUS_ZOMBIE and process.num_threads() == 1)
    except psutil.NoSuchProcess:
        return True


@contextlib.contextmanager
def held(pid: int) -> Iterator[None]:
    """Stop a process, alive and silent, for the duration of the block."""
    stop(pid)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


class Brake:
    """Stops a process, and lets it run for short slices."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.stop()

    def stop(self) -> None:
        stop(self.pid)

    def resume(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGCONT)

    def step(self, seconds: float) -> None:
        self.resume()
        time.sleep(seconds)
        self.stop()
