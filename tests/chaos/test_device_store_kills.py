"""Engine, loader or nodeagent of a mesh is killed at each step of a load onto a separate device.

So is the engine on the device that units are copied from, the holder.
The loads copy some of a model's units, copy them from another device, or have an engine that
computes meanwhile. No request is lost, the pages are exact again, and answers have the same text.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import httpx
import numpy as np
import pytest
from _pytest.mark.structures import ParameterSet

from tests.support.launcher import until
from tests.support.mesh import LOADER, NODEAGENT, at_rest, kill, mappings
from tests.support.outcomes import Asked
from tests.support.stopping_loader import HELD, VARIABLE
from tests.support.stopping_mesh import StoppingMesh
from thaw.demo.models import Shape, make_demo_model

Load = Literal["partial", "peer", "overlap"]
SHAPE = Shape(4096, 256, 1024, 6, 4, 2, 1024, "float32", 0.0)
"""Weights of 28 MiB: units of 2 to 4 MiB."""
TOKENS = 16
HOLDER, TARGET, UNIFIED = "cpu:1", "cpu:2", "cpu:0"


class Stores(StoppingMesh):
    """A mesh whose node has a unified device, and two with memory of their own."""

    def __init__(self) -> None:
        # Tests stop the loader for longer than the watchdog allows.
        super().__init__(THAW_DRAM_BYTES="0", THAW_WATCHDOG_S="120", THAW_VERIFY="true")
        self._stop = self.home / "stop"
        self.environment[VARIABLE] = str(self._stop)
        self._numbers = itertools.count(1)
        self.base = make_demo_model(self.home / "models" / "base", SHAPE)

    def begin(self) -> None:
        devices = {UNIFIED: "1GiB", **{d: {"size": "400MiB", "memory": "separate"} for d in (HOLDER, TARGET)}}
        document = {"mesh": {"port": self.port, "nodes": {"node-0": devices}}, "defaults": {"keep_alive": -1}, "models": []}
        path = self.home / "thaw.yaml"
        path.write_text(json.dumps(document))
        self.json("up", "--detach", "--config", str(path))

    def register(self, name: str, source: Path, device: str) -> str:
        """Register a model for one device, and return its name."""
        model = {"name": name, "source": str(source), "placement": {"devices": [device]}, "max_concurrency": 2}
        path = self.home / f"{name}.yaml"
        path.write_text(json.dumps({"defaults": {"keep_alive": -1}, "models": [model]}))
        self.json("models", "add", "--config", str(path))
        # A gateway learns of a new model a moment later.
        until(
            lambda: httpx.get(f"{self.url}/v1/models/{name}", timeout=120, verify=False).is_success,
            what=f"the gateway knows {name}",
        )
        return name

    def prepare(self, load: Load) -> tuple[str, str]:
        """Return a model to load in that way, and the text of its answer on the unified device.

        The target has all units but one with a partial load, and no other device has the last.
        """
        number = next(self._numbers)
        if load == "partial":
            source = with_last_norm(self.base, self.home / "models" / f"tuned-{number}", 1.0 + number / 8)
            self.answer(self.register(f"base-{number}", self.base, TARGET))
        else:
            source = make_demo_model(self.home / "models" / f"new-{number}", SHAPE, seed=number)
        if load == "peer":
            expected = self.answer(self.register(f"holder-{number}", source, HOLDER))
        else:
            expected = self.answer(self.register(f"unified-{number}", source, UNIFIED))
        return self.register(f"{load}-{number}", source, TARGET), expected

    def ask(self, model: str) -> Asked:
        return Asked(self.url, model, stream=False, tokens=TOKENS)

    def answer(self, model: str) -> str:
        outcome = self.ask(model).outcome()
        assert outcome.kind == "answered", f"{outcome}{self.last_words()}"
        return outcome.text

    # The loader's steps.

    def stop_at(self, step: str) -> None:
        self._held.unlink(missing_ok=True)  # of a loader that was killed there
        self._stop.write_text(step)

    def await_step(self, step: str) -> None:
        loader = self.pid(LOADER)
        until(self._held.exists if step == "hold" else lambda: is_stopped(loader), what=f"the loader has reached {step}")

    def resume(self) -> None:
        self._held.unlink(missing_ok=True)
        os.kill(self.pid(LOADER), signal.SIGCONT)

    @property
    def _held(self) -> Path:
        return self._stop.with_suffix(HELD)

    def starting(self, model: str) -> int:
        """Return the engine process of the model's start."""
        found: list[int] = []

        def is_there() -> bool:
            of_model = [i for n in self.cluster()["nodes"] for i in n["instances"] if i["model"] == model]
            found[:] = [pid for i in of_model if i["state"] in ("preparing", "loading") for pid in i["pids"]]
            return bool(found)

        until(is_there, what=f"an engine of {model} is being started")
        return found[0]

    # Afterwards.

    def await_node(self) -> dict[str, Any]:
        """Return the view of the node, which shows its instances only while it reports."""
        nodes: list[dict[str, Any]] = []

        def is_alive() -> bool:
            nodes[:] = [n for n in self.cluster()["nodes"] if n["node"] == "node-0"]
            return bool(nodes[0]["alive"])

        until(is_alive, what="the node reports again")
        return nodes[0]

    def devices(self) -> dict[str, dict[str, Any]]:
        """Return the audits of the devices, of which no page may be lost or in two places."""
        self.await_node()
        _, report = self._read("doctor", "--json")  # it fails for a model whose engine was killed
        audits = {a["device_id"]: a for a in json.loads(report)["audits"]["node-0"]}
        for audit in audits.values():
            parts = [audit[f"{state}_pages"] for state in ("free", "mapped", "reusable", "lent")]
            assert (sum(parts), audit["violations"]) == (audit["total_pages"], []), audit
        return audits

    def await_empty(self) -> None:
        """Put all models to sleep: no page is mapped or lent any more, and no process has one."""
        models = {i["model"] for i in self.await_node()["instances"]}
        slept = [self.json("sleep", model) for model in sorted(models)]

        def is_empty() -> bool:
            found = self.devices()
            used = [(a["mapped_pages"], a["lent_pages"], a["held_back_pages"], a["processes"]) for a in found.values()]
            return set(found) == {HOLDER, TARGET} and all(u == (0, 0, 0, []) for u in used)

        until(is_empty, what=lambda: f"no page is in use: {self.devices()}\n{slept}\n{self.cluster()['nodes']}{self.last_words()}")


def with_last_norm(base: Path, tuned: Path, value: float) -> Path:
    """Make a fine-tune whose last norm has weights of `value` and half of it in turn."""
    shutil.copytree(base, tuned)
    content = bytearray((base / "model.safetensors").read_bytes())
    start = 8 + int.from_bytes(content[:8], "little")
    low, high = json.loads(content[8:start])["model.norm.weight"]["data_offsets"]
    norm = np.full((high - low) // 4, value, np.float32)
    norm[::2] /= 2
    content[start + low : start + high] = norm.tobytes()
    (tuned / "model.safetensors").write_bytes(content)
    return tuned


def is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


@pytest.fixture(scope="module")
def stores() -> Iterator[Stores]:
    mesh = Stores()
    try:
        mesh.begin()
        yield mesh
    finally:
        mesh.close()


def _cases() -> list[ParameterSet]:
    """Return every victim at every step; `make test-long` alone has most of them."""
    steps: dict[Load, tuple[str, ...]] = {
        "partial": ("reserve", "copy", "map"),
        "peer": ("reserve", "peer", "map"),
        "overlap": ("hold",),
    }
    quick = {("partial", "copy", "engine"), ("peer", "peer", LOADER), ("overlap", "hold", NODEAGENT)}
    cases = [(load, step, v) for load, found in steps.items() for step in found for v in ("engine", LOADER, NODEAGENT)]
    cases += [("peer", step, "holder") for step in steps["peer"]]
    return [pytest.param(*c, marks=() if c in quick else pytest.mark.long, id="-".join(c)) for c in cases]


@pytest.mark.parametrize(("load", "step", "victim"), _cases())
def test_killed_at_a_step_of_a_load(stores: Stores, load: Load, step: str, victim: str) -> None:
    model, expected = stores.prepare(load)
    stores.stop_at(step)
    asked = stores.ask(model)
    try:
        stores.await_step(step)
        engine = stores.starting(model)
        if load == "overlap":
            until(lambda: has_pages(engine) and at_rest(engine), what="the engine computes what it can")
        assert asked.is_alive(), "the request waits for the load"
        if victim == "engine":
            kill(engine)
        elif victim == "holder":
            holder = stores.instance(model.replace("peer", "holder"))
            kill(holder["pids"][0])
        else:
            old = stores.kill(victim)
    finally:
        if victim != LOADER:
            stores.resume()
    outcome = asked.outcome()
    assert (outcome.kind, outcome.text) == ("answered", expected), f"{outcome}{stores.last_words()}"
    if victim in (LOADER, NODEAGENT):
        stores.await_replaced(victim, old)
    until(lambda: {HOLDER, TARGET} == set(stores.devices()), what="both devices are audited")
    assert stores.answer(model) == expected
    stores.await_empty()


def has_pages(engine: int) -> bool:
    """True if the process maps pages of a separate device."""
    return any("-pages-" in name for name, _, _ in mappings(engine))
