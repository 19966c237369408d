"""Models that share a process, through `thaw up`, beside a dedicated one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from tests.support.launcher import Thaw, until
from thaw.demo.models import make_demo_model


@pytest.fixture(scope="module")
def mesh() -> Iterator[Thaw]:
    """Start a mesh with two shared models, and a dedicated one with the weights of the first."""
    thaw = Thaw()
    first, second = [make_demo_model(thaw.home / "models" / f"m{seed}", "5m", seed) for seed in (1, 2)]
    models = {"first": (first, "shared"), "second": (second, "shared"), "alone": (first, "dedicated")}
    (thaw.home / "thaw.yaml").write_text(
        f"mesh:\n  port: {thaw.port}\n  nodes:\n    node-0: {{cpu:0: 900MiB}}\n"
        "defaults: {keep_alive: -1}\nmodels:\n"
        + "".join(f"  - {{name: {name}, source: {source}, isolation: {how}}}\n" for name, (source, how) in models.items())
    )
    try:
        thaw.json("up", "--detach", "--config", str(thaw.home / "thaw.yaml"))
        yield thaw
    finally:
        thaw.close()


def text(mesh: Thaw, model: str) -> str:
    return str(mesh.json("chat", model, "Once upon a time", "--max-tokens", "12", "--temperature", "0")["text"])


def running(mesh: Thaw) -> dict[str, dict[str, Any]]:
    return {i["model"]: i for i in mesh.cluster()["instances"] if i["state"] == "ready"}


def test_shared_models_answer_sleep_wake_and_survive_the_end_of_their_executor(mesh: Thaw) -> None:
    answers = {name: text(mesh, name) for name in ("first", "second", "alone")}
    assert answers["first"] == answers["alone"] != answers["second"]
    ready = running(mesh)
    assert ready["first"]["pids"] == ready["second"]["pids"] != ready["alone"]["pids"]
    [pid] = ready["first"]["pids"]

    mesh.json("sleep", "second")
    assert psutil.pid_exists(pid), "the other model still runs in it"
    assert set(running(mesh)) == {"first", "alone"}
    mesh.json("wake", "second")
    assert running(mesh)["second"]["pids"] == [pid]
    assert text(mesh, "second") == answers["second"]
    spans = {span["phase"] for span in mesh.json("explain", "second")["measured"]}
    assert "attach" in spans
    assert "container" not in spans

    psutil.Process(pid).kill()
    until(lambda: set(running(mesh)) == {"alone"}, what="both models of the executor have failed")
    assert [text(mesh, name) for name in ("first", "second")] == [answers["first"], answers["second"]]
    assert running(mesh)["first"]["pids"] == running(mesh)["second"]["pids"] != [pid]
