"""`thaw sleep` suspends; a request or `thaw wake` resumes the same process.

The tokens are the same, and the memory is free meanwhile.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.launcher import Thaw, until
from tests.support.paced_zygote import with_slow_starts
from tests.support.paging import skip_unless_able
from tests.support.prometheus import SUSPENSION_PANELS, Prometheus, needs_prometheus
from thaw.demo.models import make_demo_model

START_S = 8.0
"""More than a resume takes on a busy machine: one that resumes no faster is stopped instead."""


@contextlib.contextmanager
def home_with_a_model(options: str) -> Iterator[Thaw]:
    skip_unless_able()
    thaw = Thaw(THAW_SUSPEND="auto", **with_slow_starts(START_S))
    thaw.keep_port("THAW_SCHEDULER_METRICS_PORT")
    try:
        model = make_demo_model(thaw.home / "models" / "m", "60m")
        (thaw.home / "thaw.yaml").write_text(
            f"mesh:\n  port: {thaw.port}\n  nodes:\n    node-0: {{cpu:0: 600MiB}}\n"
            f"defaults: {{keep_alive: -1{options}}}\nmodels:\n  - {{name: m, source: {model}}}\n"
        )
        yield thaw
    finally:
        thaw.close()


@pytest.fixture
def mesh() -> Iterator[Thaw]:
    with home_with_a_model("") as thaw:
        thaw.json("up", "--detach", "--config", str(thaw.home / "thaw.yaml"))
        yield thaw


def facts(mesh: Thaw) -> dict[str, Any]:
    (found,) = (i for i in mesh.cluster()["instances"] if i["state"] != "stopped")
    return dict(found)


def text(mesh: Thaw) -> str:
    body = {"model": "m", "prompt": "once", "max_tokens": 12, "temperature": 0}
    answer = httpx.post(f"{mesh.url}/v1/completions", json=body, timeout=120)
    assert answer.is_success, answer.text
    return str(answer.json()["choices"][0]["text"])


def test_slept_model_wakes_with_the_same_process_and_output(mesh: Thaw) -> None:
    before = text(mesh)
    until(lambda: bool(facts(mesh)["can_suspend"]), what=lambda: f"the instance can be suspended: {facts(mesh)}")
    ready = facts(mesh)
    slept = mesh.json("sleep", "m")
    suspended = facts(mesh)
    assert suspended["state"] == "suspended"
    assert suspended["pids"] == ready["pids"]
    assert suspended["freed_by_last_suspend_bytes"] == slept["freed_bytes"] > 64 << 20
    assert suspended["reserved_bytes"] < ready["reserved_bytes"] / 2
    assert mesh.cluster()["models"][0]["state"] == "suspended"
    assert text(mesh) == before, "a request brings it back"
    until(lambda: bool(facts(mesh)["state"] == "ready"), what=lambda: f"the instance is ready: {facts(mesh)}")
    awake = facts(mesh)
    assert awake["pids"] == ready["pids"]
    assert awake["last_resume"]["took_ms"] > 0
    plan = mesh.plan("m")
    assert plan["way"] == "restore"


@needs_prometheus
def test_dashboard_shows_suspensions_and_resumptions(mesh: Thaw, tmp_path: Path) -> None:
    text(mesh)
    with contextlib.closing(Prometheus(tmp_path, mesh)) as prometheus:

        def suspend_and_resume() -> None:
            text(mesh)
            mesh.json("sleep", "m")

        assert len(SUSPENSION_PANELS) == 3
        prometheus.await_data(SUSPENSION_PANELS, suspend_and_resume)
        counted = {kind: prometheus.query(f"sum(thaw_{kind}_seconds_count)")[0]["value"][1] for kind in ("suspend", "resume")}
        (instance,) = (i for n in mesh.cluster()["nodes"] for i in n["instances"])
        suspension = instance["suspension"]
        in_swap = f'thaw_suspended_bytes{{thaw_place="swap"}} == {suspension["swap_bytes"]}'
        until(lambda: bool(prometheus.query(in_swap)), what=f"Prometheus has the {suspension['swap_bytes']} bytes in swap")
        assert 0 <= int(counted["suspend"]) - int(counted["resume"]) <= 1
        assert suspension["resumes"] >= int(counted["resume"]) > 0


def test_parked_models_are_suspended_before_their_first_request() -> None:
    with home_with_a_model(", park: true") as mesh:
        up = mesh.run("up", "--detach", "--config", str(mesh.home / "thaw.yaml"))
        assert up.returncode == 0, up.stdout + up.stderr + mesh.last_words()
        assert "m is parked" in up.stdout
        (m,) = mesh.cluster()["models"]
        assert (m["state"], m["park"]["state"]) == ("suspended", "parked")
        parked = facts(mesh)
        assert text(mesh)
        assert facts(mesh)["pids"] == parked["pids"], "the first request finds it there"
        assert mesh.plan("m")["way"] == "restore"
