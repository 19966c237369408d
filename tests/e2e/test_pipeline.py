"""A model in stages, through `thaw up`: on two devices of a node, too large for one of them.

The devices have memory of their own, as two GPUs have.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from tests.support.launcher import running, until
from tests.support.moving import STAGED_OPTIONS, Roomy, Stream, body, stage_budgets
from tests.support.paced_zygote import Pace
from thaw.demo.models import make_demo_model

LONG: dict[str, Any] = {"max_tokens": 150, "ignore_eos": True}
STEP_S = 0.2
"""The response takes half a minute while engines are slow: until a process is killed."""
KILLED_STEP_S = 0.02
"""Seconds of a step while stages are killed again and again."""


@pytest.fixture(scope="module")
def mesh(pace: Pace) -> Iterator[Roomy]:
    """Start a mesh with one model in two stages, and the same weights served by one engine."""
    thaw = Roomy(THAW_DRAM_BYTES="0", THAW_VERIFY="true", **pace.environment)
    source = make_demo_model(thaw.home / "models" / "m", "test")
    stage, whole = stage_budgets(source)
    nodes = {
        "node-0": {device: {"size": stage, "memory": "separate"} for device in ("cpu:0", "cpu:1")},
        "node-1": {"cpu:0": whole},
    }
    models: list[dict[str, Any]] = [
        {"name": "staged", "source": str(source), "stages": 2},
        {"name": "single", "source": str(source)},
    ]
    with running(thaw, nodes, models, **STAGED_OPTIONS) as found:
        yield found


@pytest.fixture(scope="module")
def expected(mesh: Roomy) -> Stream:
    return Stream(mesh.url, body("single", **LONG)).start().result()


def test_group_takes_both_devices_and_answers_as_one_engine(mesh: Roomy, expected: Stream) -> None:
    assert Stream(mesh.url, body("staged", **LONG)).start().result().text == expected.text
    instance = mesh.instance("staged")
    assert instance["device_ids"] == ["cpu:0", "cpu:1"]
    assert len(instance["pids"]) == 2
    assert "stages" in instance["suspension"]["reason"]


@pytest.mark.parametrize("victim", [0, 1])
def test_response_continues_after_the_death_of_any_stage_and_no_half_group_is_left(
    mesh: Roomy, pace: Pace, expected: Stream, victim: int
) -> None:
    with pace.slowed(STEP_S):
        stream = Stream(mesh.url, body("staged", **LONG)).start()
        assert stream.opened.wait(120)
        instance = mesh.instance("staged")
        name = instance["instance_id"]
        processes = [psutil.Process(pid) for pid in instance["pids"]]
        processes[victim].kill()
    assert stream.result().text == expected.text
    assert not psutil.wait_procs(processes, timeout=60)[1]
    others: list[dict[str, Any]] = []

    def another_is_ready() -> bool:
        others[:] = [i for i in mesh.instances("staged") if i["state"] == "ready" and i["instance_id"] != name]
        return bool(others)

    until(another_is_ready, what="another group is ready")  # it may respond before its node has reported it ready
    [another] = others
    assert not set(another["pids"]) & set(instance["pids"])


@pytest.mark.parametrize("kills", [2, pytest.param(30, marks=pytest.mark.long)])
def test_no_response_is_lost_or_different_while_stages_are_killed(mesh: Roomy, pace: Pace, expected: Stream, kills: int) -> None:
    """Stages are killed at random, also while a group starts, under three streams."""
    with pace.slowed(KILLED_STEP_S):
        streams = kill_stages(mesh, expected, kills)
    assert [s.result().text for s in streams] == [expected.text] * 3
    assert not [s.error for s in streams if s.error]


def kill_stages(mesh: Roomy, expected: Stream, kills: int) -> list[Stream]:
    """Kill stages under three streams, and return those that run at the end."""
    chance = random.Random(7)
    streams = [Stream(mesh.url, body("staged", **LONG)).start() for _ in range(3)]
    for _ in range(kills):
        for stream in [s for s in streams if s.done]:
            assert stream.result().text == expected.text
            streams[streams.index(stream)] = Stream(mesh.url, body("staged", **LONG)).start()
        seen = {i["instance_id"] for i in mesh.instances("staged") if i["state"] in ("stopped", "failed")}
        begun: list[dict[str, Any]] = []

        def has_begun(seen: set[str] = seen, begun: list[dict[str, Any]] = begun) -> bool:
            begun[:] = [i for i in mesh.instances("staged") if i["instance_id"] not in seen and len(i["pids"]) == 2]
            return bool(begun)

        until(has_begun, what="a group")
        time.sleep(chance.uniform(0, 0.4))  # to hit other moments of the start and of the responses
        with contextlib.suppress(psutil.NoSuchProcess):
            psutil.Process(chance.choice(begun[-1]["pids"])).kill()
    return streams


def test_stopped_group_frees_both_devices(mesh: Roomy) -> None:
    mesh.json("wake", "staged")
    mesh.json("sleep", "staged")

    def is_free() -> bool:
        """True if both are free, and killed groups are no longer listed either."""
        [node] = [n for n in mesh.cluster()["nodes"] if n["node"] == "node-0"]
        return [d["reserved_bytes"] for d in node["devices"]] == [0, 0] and mesh.instances("staged") == []

    until(is_free, what="both devices are free")
