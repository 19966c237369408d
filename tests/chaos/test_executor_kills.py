"""SIGKILL of executor, nodeagent and loader while shared models attach, swap and compute.

Clients request three shared models on a device with room for two, without retries of their own.
Every response is whole and equal to the undisturbed one.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from shared.contracts.executor import parse_current
from shared.contracts.models import ModelSpec
from shared.contracts.node import InstanceState
from shared.sizing import need_of
from tests.support.launcher import until
from tests.support.mesh import LOADER, MODELS, NODEAGENT, Victim
from tests.support.outcomes import Asked
from tests.support.paced_zygote import slowed_by
from tests.support.sizes import size
from thaw.cli.demo import card_of
from thaw.demo.models import make_demo_model

KILLS = int(os.environ.get("THAW_TEST_EXECUTOR_KILLS", "0"))
"""Kills at random times. `make test-long` sets 200."""
SEED = int(os.environ.get("THAW_TEST_SEED", "18"))
CLIENTS = 4
TOKENS, STEP_S = size((20, 0.02), (60, 0.0))
PHASES = ("attach", "swap", "compute")
PROCESSES = ("executor", NODEAGENT, LOADER)
FEW = [("executor", "attach"), ("executor", "swap"), ("executor", "compute"), (NODEAGENT, "attach"), (LOADER, "swap")]
CASES = list(itertools.product(PROCESSES, PHASES)) if KILLS else FEW
"""Kills in a certain phase, before those at random times."""


@pytest.fixture(scope="module")
def shared() -> Iterator[Victim]:
    """Start a mesh whose device has room for an executor with two of three models."""
    thaw = Victim(THAW_WATCHDOG_S="60", THAW_DRAM_BYTES="0", **slowed_by(STEP_S))
    models = thaw.home / "models"
    specs = [
        ModelSpec(name=name, source=str(make_demo_model(models / name, "test", seed=i)), isolation="shared")
        for i, name in enumerate(MODELS)
    ]
    need = need_of(card_of(specs[0]))
    budget = need.executor + 2 * need.total + need.total // 2
    (thaw.home / "thaw.yaml").write_text(
        f"mesh:\n  port: {thaw.port}\n  nodes:\n    node-0: {{cpu:0: {budget}}}\n"
        "defaults: {keep_alive: -1, isolation: shared}\nmodels:\n"
        + "".join(f"  - {{name: {s.name}, source: {s.source}}}\n" for s in specs)
    )
    try:
        thaw.json("up", "--detach", "--config", str(thaw.home / "thaw.yaml"))
        yield thaw
    finally:
        thaw.close()


class Clients:
    """Requests without retries, several at a time, each compared with the undisturbed response."""

    def __init__(self, mesh: Victim, expected: dict[str, str]) -> None:
        self._mesh, self._expected = mesh, expected
        self._over = threading.Event()
        self._answered = threading.Condition()
        self.outcomes: Counter[str] = Counter()
        self.faults: list[str] = []
        self._threads = [threading.Thread(target=self._run, args=(n,), name=f"client {n}") for n in range(CLIENTS)]

    def _run(self, number: int) -> None:
        draw = random.Random(SEED + number)
        while not self._over.is_set():
            model = draw.choice(MODELS)
            outcome = Asked(self._mesh.url, model, tokens=TOKENS, stream=draw.random() < 0.5).outcome()
            with self._answered:
                self.outcomes[outcome.kind] += 1
                if outcome.kind != "answered" or outcome.text != self._expected[model]:
                    self.faults.append(f"{model}: {outcome}")
                self._answered.notify_all()

    def await_answers(self, count: int) -> None:
        """Wait until `count` more requests have been answered, or one was not."""
        with self._answered:
            wanted = self.outcomes["answered"] + count
            assert self._answered.wait_for(lambda: self.faults or self.outcomes["answered"] >= wanted, 120), "no more answers"

    def __enter__(self) -> Clients:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(240)


def executors(mesh: Victim) -> list[psutil.Process]:
    return mesh.engines()


def kill(mesh: Victim, process: str) -> bool:
    """Kill a process, and return once it is replaced; False if there is none."""
    if process != "executor":
        old = mesh.kill(process)
        mesh.await_replaced(process, old)
        return True
    running = executors(mesh)
    for found in running:
        with contextlib.suppress(psutil.NoSuchProcess):
            found.kill()
    psutil.wait_procs(running, timeout=60)
    return bool(running)


def is_computing(current: Path) -> bool:
    """True if the executor of this file computes a step; its node removes the file with it."""
    try:
        return bool(parse_current(current.read_bytes())[1])
    except FileNotFoundError:
        return False


def in_phase(mesh: Victim, phase: str) -> bool:
    """True if an instance attaches, is swapped out, or computes a step."""
    if phase == "compute":
        return any(is_computing(path) for path in (mesh.home / "nodes" / "node-0" / "agent" / "executors").glob("*.current"))
    states = [InstanceState(i["state"]) for n in mesh.cluster()["nodes"] for i in n["instances"]]
    return any(state.starting if phase == "attach" else state is InstanceState.DRAINING for state in states)


def await_phase(mesh: Victim, phase: str, clients: Clients) -> None:
    """Wait until an instance is in the phase, or a response was lost."""
    deadline = time.monotonic() + 120
    while not clients.faults and not in_phase(mesh, phase):
        assert time.monotonic() < deadline, f"no instance in phase {phase}: {clients.outcomes}, {mesh.instances_in_words()}"
        time.sleep(0.001)


def faults_in_the_books(mesh: Victim) -> list[str]:
    """Return instances in between, and bookings and processes without an owner."""
    (node,) = mesh.cluster()["nodes"]
    live = [i for i in node["instances"] if InstanceState(i["state"]).holds_memory]
    faults = [f"{i['instance_id']} is {i['state']}" for i in live if i["state"] != "ready"]
    (device,) = node["devices"]
    booked = sum(i["memory"]["reserved"] for i in live) + device["executor_bytes"]
    if device["reserved_bytes"] != booked:
        faults.append(f"{device['reserved_bytes']} bytes reserved, and {booked} by live instances and the executor")
    if device["reserved_bytes"] > device["budget_bytes"]:
        faults.append(f"{device['reserved_bytes']} bytes reserved of {device['budget_bytes']}")
    if {pid for i in live for pid in i["pids"]} - {p.pid for p in executors(mesh)} or len(executors(mesh)) > 1:
        faults.append(f"executors {executors(mesh)}, and instances {live}")
    return faults


@pytest.mark.timeout(900 + 20 * KILLS)
def test_no_response_is_lost_when_processes_are_killed_in_any_phase(shared: Victim) -> None:
    expected = {model: Asked(shared.url, model, tokens=TOKENS).outcome().text for model in MODELS}
    assert len(set(expected.values())) == len(MODELS)
    draw = random.Random(SEED)
    hit: Counter[str] = Counter()
    with Clients(shared, expected) as clients:
        for process, phase in CASES:
            await_phase(shared, phase, clients)
            hit[f"{process} {phase}"] += kill(shared, process)
            clients.await_answers(2)
            assert not clients.faults, f"after {process} in {phase}: {clients.faults}{shared.last_words()}"
        for number in range(KILLS):
            clients.await_answers(draw.randrange(1, CLIENTS))
            time.sleep(draw.uniform(0.0, 0.2))  # the phase is random
            process = draw.choice(PROCESSES)
            kill(shared, process)
            clients.await_answers(2)
            assert not clients.faults, f"after kill {number} of {process}: {clients.faults}{shared.last_words()}"
    assert not clients.faults, clients.faults
    assert set(clients.outcomes) == {"answered"}
    assert set(hit) == {f"{process} {phase}" for process, phase in CASES}
    until(lambda: not faults_in_the_books(shared), what="each booking has an owner")
