"""Stopped or blocked processes of a real mesh are restarted with a reason.

Engines continue.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import openai
import psutil
import pytest

from shared.contracts.models import ModelSpec
from shared.watchdog.decision import LONGEST_STEP_S
from tests.support.launcher import Thaw, until
from thaw.cli.demo import budget_for_two
from thaw.demo.models import make_demo_model

LIMIT_S = 3
SERVICES = ("gateway", "scheduler", "migrator", "nodeagent.node-0", "loader.node-0", "nats", "postgres")


@pytest.fixture(scope="module")
def mesh() -> Iterator[Thaw]:
    thaw = Thaw(THAW_WATCHDOG_S=str(LIMIT_S))
    source = make_demo_model(thaw.home / "models" / "one", "test")
    budget = budget_for_two((ModelSpec(name="one", source=str(source)),) * 3)
    config = thaw.home / "thaw.yaml"
    config.write_text(
        f"mesh:\n  port: {thaw.port}\n  nodes:\n    node-0: {{cpu:0: {budget}}}\n"
        f"models:\n  - {{name: one, source: {source}, keep_alive: -1}}\n"
    )
    try:
        thaw.json("up", "--detach", "--config", str(config))
        yield thaw
    finally:
        thaw.close()


def ask(mesh: Thaw) -> str:
    with openai.OpenAI(base_url=f"{mesh.url}/v1", api_key="none", timeout=60, max_retries=5) as client:
        answer = client.completions.create(model="one", prompt="hello", max_tokens=4, temperature=0)
    return answer.choices[0].text


@pytest.mark.parametrize("name", SERVICES)
def test_a_stopped_process_is_restarted_and_engines_continue(mesh: Thaw, name: str) -> None:
    answer = ask(mesh)
    (engine,) = (i["pids"] for i in mesh.instances("one"))
    hangs = mesh.status(name)["hangs"]
    old = mesh.pid(name)
    children = psutil.Process(old).children(recursive=True) if name == "postgres" else []
    for pid in (old, *(c.pid for c in children)):
        os.kill(pid, signal.SIGSTOP)
    mesh.await_replaced(name, old)
    assert not psutil.pid_exists(old) or psutil.Process(old).status() == psutil.STATUS_ZOMBIE
    assert ask(mesh) == answer
    until(lambda: [i["pids"] for i in mesh.instances("one")] == [engine], what="the live engine is kept")
    until(lambda: mesh.status(name)["status"] == "ready", what="the new process reports that it is ready")
    after = mesh.status(name)
    assert after["hangs"] == hangs + 1
    assert "the process is stopped" in after["last_hang"]
    shown = mesh.json("ps")["services"][name]
    assert (shown["status"], shown["hangs"]) == ("ready", hangs + 1)
    assert f"{name} hung and was restarted" in mesh.inside("ps")[1]
    assert f"{name} hangs and is restarted" in (mesh.home / "logs" / "supervisor.log").read_text()


def test_supervisor_restart_kills_no_healthy_process(mesh: Thaw) -> None:
    """A killed supervisor and its successor report no false hang.

    Services send heartbeats to the new supervisor's sockets; services that survived are watched
    again, with the limit of a loop that runs, even if they hang before their first heartbeat.
    """
    before = {name: mesh.pid(name) for name in SERVICES}
    mesh.kill("supervisor")
    mesh.json("up", "--detach", "--config", str(mesh.home / "thaw.yaml"))
    assert {name: mesh.pid(name) for name in SERVICES} == before
    old = mesh.pid("loader.node-0")
    os.kill(old, signal.SIGSTOP)  # most often before its first heartbeat to the new supervisor
    until(lambda: mesh.replaced("loader.node-0", old), what="the loader is started again")
    assert {name: mesh.pid(name) for name in SERVICES if name != "loader.node-0"} == {
        name: pid for name, pid in before.items() if name != "loader.node-0"
    }
    until(lambda: mesh.status("loader.node-0")["status"] == "ready", what="the new loader reports that it is ready")
    silent_s = int(mesh.status("loader.node-0")["last_hang"].split(" for ")[1].split(" s")[0])
    assert LIMIT_S <= silent_s <= LIMIT_S + LONGEST_STEP_S
