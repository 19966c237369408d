"""A model in stages on several nodes, through `thaw up`: too large for each node.

Each node has a loader, a nodeagent and engines of its own, all on this machine.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import openai
import psutil
import pytest

from shared.sizing import MIB
from tests.support.hosted import fake_program
from tests.support.launcher import running, until
from tests.support.moving import STAGED_OPTIONS, Roomy, Stream, body, stage_budgets
from tests.support.paced_zygote import Pace
from thaw.demo.models import make_demo_model

LONG: dict[str, Any] = {"max_tokens": 150, "ignore_eos": True}
STEP_S = 0.2
"""The response takes half a minute while engines are slow: until a process is killed."""
RANKS = {"engine": "vllm", "stages": 2, "memory": 64 * MIB, "engine_args": {"tensor_parallel_size": 2}}
NODES = ("node-0", "node-1", "node-2")


@pytest.fixture(scope="module")
def mesh(pace: Pace) -> Iterator[Roomy]:
    """Start three nodes with room for a stage each, and one for the whole model in one engine."""
    thaw = Roomy(THAW_DRAM_BYTES="0", **pace.environment)
    thaw.environment["THAW_VLLM_PYTHON"] = fake_program(thaw.home, "vllm")
    source = make_demo_model(thaw.home / "models" / "m", "test")
    stage, whole = stage_budgets(source)
    # Each fits a node alone, and leaves no room for a stage.
    small = {"source": str(source), "engine_args": {"kv_cache_bytes": 16 * MIB}}
    fillers = [{"name": f"on-{n}", **small, "placement": {"devices": [f"{n}/*"]}} for n in NODES]
    models: list[dict[str, Any]] = [
        {"name": "staged", "source": str(source), "stages": 2, "placement": {"devices": ["node-*/*"]}},
        {"name": "single", "source": str(source), "placement": {"devices": ["whole/*"]}},
        {"name": "ranks", "source": str(source), **RANKS, "placement": {"devices": ["node-*/*"]}},
        *fillers,
    ]
    nodes = {**{node: {"cpu:0": stage} for node in NODES}, "whole": {"cpu:0": whole}}
    with running(thaw, nodes, models, **STAGED_OPTIONS) as found:
        yield found


@pytest.fixture(scope="module")
def expected(mesh: Roomy) -> Stream:
    return Stream(mesh.url, body("single", **LONG)).start().result()


def stages_of(mesh: Roomy) -> dict[int, tuple[str, dict[str, Any]]]:
    """Return node and instance of each stage that is ready, by index."""
    nodes = mesh.cluster()["nodes"]
    return {
        i["group"]["index"]: (n["node"], i)
        for n in nodes
        for i in n["instances"]
        if i["model"] == "staged" and i["state"] == "ready" and i["group"] is not None
    }


def both_stages(mesh: Roomy) -> list[tuple[str, dict[str, Any]]]:
    until(lambda: len(stages_of(mesh)) == 2, what="both stages are ready")
    found = stages_of(mesh)
    return [found[0], found[1]]


def test_group_takes_a_device_of_each_of_two_nodes_and_answers_as_one_engine(mesh: Roomy, expected: Stream) -> None:
    assert Stream(mesh.url, body("staged", **LONG)).start().result().text == expected.text
    (node, first), (other, later) = both_stages(mesh)
    assert node != other
    assert later["group"]["first"] == first["instance_id"]
    plan = mesh.json("explain", "staged")
    assert (plan["chosen"]["ready_by"], plan["chosen"]["stages"]) == ("pipeline", 2)
    assert plan["chosen"]["later_devices"] == [f"{other}/cpu:0"]


@pytest.mark.parametrize("victim", [0, 1])
def test_response_continues_after_the_death_of_any_stage_and_no_half_group_is_left(
    mesh: Roomy, pace: Pace, expected: Stream, victim: int
) -> None:
    with pace.slowed(STEP_S):
        stream = Stream(mesh.url, body("staged", **LONG)).start()
        assert stream.opened.wait(120)
        stages = both_stages(mesh)
        processes = [psutil.Process(i["pids"][0]) for _, i in stages]
        processes[victim].kill()
    assert stream.result().text == expected.text
    assert not psutil.wait_procs(processes, timeout=60)[1]
    again = both_stages(mesh)
    assert not {i["pids"][0] for _, i in stages} & {i["pids"][0] for _, i in again}


def is_restarted(mesh: Roomy, service: str, old: int) -> bool:
    process = mesh.status(service)["process"]
    return process is not None and process["pid"] != old


@pytest.mark.parametrize("service", ["nodeagent", "scheduler"])
def test_group_survives_a_nodeagent_and_the_scheduler(mesh: Roomy, pace: Pace, expected: Stream, service: str) -> None:
    mesh.json("wake", "staged")
    stages = both_stages(mesh)
    with pace.slowed(STEP_S):
        stream = Stream(mesh.url, body("staged", **LONG)).start()
        assert stream.opened.wait(120)
        name = "scheduler" if service == "scheduler" else f"nodeagent.{stages[1][0]}"
        old = mesh.pid(name)
        os.kill(old, signal.SIGKILL)
        until(lambda: is_restarted(mesh, name, old), what=f"{name} is restarted")
    assert stream.result().text == expected.text
    again = both_stages(mesh)
    assert [i["pids"] for _, i in again] == [i["pids"] for _, i in stages]


def test_stopped_group_frees_the_devices_of_both_nodes(mesh: Roomy) -> None:
    mesh.json("wake", "staged")
    mesh.json("sleep", "staged")

    def is_free() -> bool:
        nodes = [n for n in mesh.cluster()["nodes"] if n["node"] in NODES]
        return not any(d["reserved_bytes"] for n in nodes for d in n["devices"])

    until(is_free, what="all stages have stopped")


def models_on(mesh: Roomy) -> dict[str, set[str]]:
    """Return the models with memory on each node."""
    return {
        n["node"]: {i["model"] for i in n["instances"] if i["state"] not in ("stopped", "failed")}
        for n in mesh.cluster()["nodes"]
        if n["node"] in NODES
    }


def test_group_evicts_idle_instances_on_the_devices_of_both_stages(mesh: Roomy, expected: Stream) -> None:
    for node in NODES:
        mesh.json("wake", f"on-{node}")
    assert models_on(mesh) == {n: {f"on-{n}"} for n in NODES}
    assert Stream(mesh.url, body("staged", **LONG)).start().result().text == expected.text
    plan = mesh.json("explain", "staged")
    assert (plan["chosen"]["ready_by"], plan["chosen"]["clearing"]) == ("pipeline", "evict"), plan
    assert len(plan["chosen"]["victims"]) == 2
    taken = {node for node, _ in both_stages(mesh)}
    assert models_on(mesh) == {n: {"staged"} if n in taken else {f"on-{n}"} for n in NODES}, "the third node keeps its model"


def test_idle_group_is_evicted_for_a_model_on_the_device_of_its_later_stage(mesh: Roomy) -> None:
    mesh.json("wake", "staged")
    (first, _), (later, _) = both_stages(mesh)
    mesh.json("wake", f"on-{later}")
    until(lambda: models_on(mesh)[first] == set(), what="the group has left both devices")
    assert models_on(mesh)[later] == {f"on-{later}"}


def ranks_of(mesh: Roomy) -> list[tuple[str, dict[str, Any]]]:
    """Return node and instance of each rank of the vLLM over several nodes that is ready."""
    nodes = mesh.cluster()["nodes"]
    found = [(n["node"], i) for n in nodes for i in n["instances"] if i["model"] == "ranks" and i["state"] == "ready"]
    return sorted(found, key=lambda rank: rank[1]["group"]["index"])


@pytest.mark.parametrize("victim", [0, 1])
def test_vllm_over_two_nodes_is_one_instance_and_shares_one_fate(mesh: Roomy, victim: int) -> None:
    with openai.OpenAI(base_url=f"{mesh.url}/v1", api_key="none", timeout=120, max_retries=0) as client:

        def text() -> str | None:
            answer = client.chat.completions.create(model="ranks", messages=[{"role": "user", "content": "Hi"}], max_tokens=2)
            return answer.choices[0].message.content

        assert text() == "t0 t1 "
        until(lambda: len(ranks_of(mesh)) == 2, what="both ranks are ready")
        ranks = ranks_of(mesh)
        assert ranks[0][0] != ranks[1][0]
        assert ranks[1][1]["group"]["first"] == ranks[0][1]["instance_id"]
        hosts = [psutil.Process(i["pids"][0]) for _, i in ranks]
        engines = [engine for host in hosts for engine in host.children()]
        hosts[victim].children()[0].kill()
        assert not psutil.wait_procs([*hosts, *engines], timeout=60)[1]
        assert text() == "t0 t1 "
    mesh.json("sleep", "ranks")
    until(lambda: not ranks_of(mesh), what="no rank is left")
