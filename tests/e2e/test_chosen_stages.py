"""The scheduler chooses the number of stages, through `thaw up`: where the objective needs a group.

Two nodes fetch from a server that is paced for each connection, and each loader has one connection:
so the link of each node is paced. Predictions are the scheduler's own, learned from a first load.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from shared.contracts.models import ModelSpec
from shared.sizing import MIB, need_of
from tests.integration.loader.tiers_server import TierServer
from tests.support.launcher import until
from tests.support.moving import Roomy, Stream, body
from thaw.cli.demo import card_of
from thaw.demo.models import Shape, make_demo_model

LONG: dict[str, Any] = {"max_tokens": 200, "ignore_eos": True}
NODES = ("node-0", "node-1")
OPTIONS: dict[str, Any] = {"max_concurrency": 4, "keep_alive": -1}
SHAPE = Shape(1024, 128, 512, 8, 4, 2, 1024, "float32", 0.0)
PIECE_DELAY_S = 0.06
"""For each 64 KiB: some 8 s for the model's 9 MB, half of it for a stage."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TierServer]:
    directory = tmp_path_factory.mktemp("www")
    for seed, name in enumerate(("far", "near", "tight", "loose", *(f"probe-{n}" for n in NODES))):
        make_demo_model(directory / name, SHAPE, seed=seed)
    found = TierServer(directory)
    found.faults.piece_delay_s = PIECE_DELAY_S
    yield found
    found.close()


@pytest.fixture(scope="module")
def mesh(server: TierServer) -> Iterator[Roomy]:
    """Start two nodes with paced links, which have measured them, and one beside."""
    thaw = Roomy(THAW_DRAM_BYTES="0", THAW_LOADER_REMOTE_THREADS="1")
    source = server.directory / "far"
    need = 2 * need_of(card_of(ModelSpec(name="single", source=str(source), max_concurrency=4))).total + 16 * MIB
    probes = [{"name": f"probe-{n}", "source": f"{server.url}/probe-{n}", "placement": {"devices": [f"{n}/*"]}} for n in NODES]
    config = {
        "mesh": {"port": thaw.port, "nodes": {**{n: {"cpu:0": need} for n in NODES}, "beside": {"cpu:0": need}}},
        "defaults": OPTIONS,
        "models": [*probes, {"name": "single", "source": str(source), "placement": {"devices": ["beside/*"]}}],
    }
    (thaw.home / "thaw.yaml").write_text(json.dumps(config))
    try:
        thaw.json("up", "--detach", "--config", str(thaw.home / "thaw.yaml"))
        for n in NODES:
            thaw.json("wake", f"probe-{n}")
            thaw.json("sleep", f"probe-{n}")
        until(lambda: all(has_measured(thaw, n) for n in NODES), what="the loaders report their links")
        yield thaw
    finally:
        thaw.close()


def has_measured(mesh: Roomy, node: str) -> bool:
    [view] = [n for n in mesh.cluster()["nodes"] if n["node"] == node]
    links = view["loader"]["links"] if view["loader"] else []
    return any(x["link"].startswith("remote:") and x["bytes_per_second"] for x in links)


def register(mesh: Roomy, server: TierServer, name: str, ttft: float | None, devices: str = "node-*/*") -> None:
    """Register a remote model with an objective, or change its objective."""
    model = {"name": name, "source": f"{server.url}/{name}", "slo": {"ttft": ttft}, "placement": {"devices": [devices]}}
    path = mesh.home / f"{name}.yaml"
    path.write_text(json.dumps({"defaults": OPTIONS, "models": [model]}))
    mesh.json("models", "add", "--config", str(path))


def predicted_ms(mesh: Roomy, name: str) -> dict[int, float]:
    """Return the predicted start of the model by number of stages, as `thaw explain` shows it."""
    plan = mesh.json("explain", name, "--what-if", "drop-node=beside")
    found = {c["stages"]: c["predicted_ms"] for c in plan["candidates"] if c["predicted_ms"]}
    assert sorted(found) == [1, 2], plan
    return found


def stages_of(mesh: Roomy, name: str) -> dict[int, str]:
    """Return the node of each ready stage of a group, by index."""
    return {
        i["group"]["index"]: n["node"]
        for n in mesh.cluster()["nodes"]
        for i in n["instances"]
        if i["model"] == name and i["state"] == "ready" and i["group"] is not None
    }


def test_objective_that_one_node_misses_is_met_by_a_group_that_answers_as_one_engine(mesh: Roomy, server: TierServer) -> None:
    register(mesh, server, "far", 0.001)
    by_stages = predicted_ms(mesh, "far")
    assert by_stages[2] < by_stages[1]
    register(mesh, server, "far", (by_stages[1] + by_stages[2]) / 2e3)
    answer = Stream(mesh.url, body("far", **LONG)).start().result()
    plan = mesh.json("explain", "far")
    assert (plan["chosen"]["ready_by"], plan["chosen"]["stages"]) == ("pipeline", 2), plan
    assert "one worker would miss the objective" in plan["reason"]
    assert plan["chosen"]["stage_sources"] == ["remote", "remote"]
    assert plan["chosen"]["took_ms"] is not None, "the error of the prediction is recorded"
    until(lambda: sorted(stages_of(mesh, "far")) == [0, 1], what="both stages are ready")
    assert sorted(stages_of(mesh, "far").values()) == sorted(NODES)
    assert answer.text == Stream(mesh.url, body("single", **LONG)).start().result().text
    mesh.json("sleep", "far")


def test_objective_that_one_node_meets_gets_one_engine(mesh: Roomy, server: TierServer) -> None:
    register(mesh, server, "near", 0.001)
    register(mesh, server, "near", 10 * predicted_ms(mesh, "near")[1] / 1e3)
    Stream(mesh.url, body("near", **LONG)).start().result()
    plan = mesh.json("explain", "near")
    assert plan["chosen"]["stages"] == 1, plan
    [group] = [c for c in plan["candidates"] if c["stages"] == 2]
    assert "one worker meets the objective" in group["excluded"]
    assert not stages_of(mesh, "near")


def test_fetch_waits_while_it_would_make_another_one_miss_its_objective(mesh: Roomy, server: TierServer) -> None:
    register(mesh, server, "loose", None, "node-0/*")
    register(mesh, server, "tight", 0.001, "node-0/*")
    [alone_ms] = [
        c["predicted_ms"] for c in mesh.json("explain", "tight", "--what-if", "drop-node=beside")["candidates"] if c["predicted_ms"]
    ]
    register(mesh, server, "tight", 1.25 * alone_ms / 1e3, "node-0/*")
    tight = Stream(mesh.url, body("tight", **LONG)).start()
    until(lambda: is_starting(mesh, "tight"), what="the first model fetches")
    loose = Stream(mesh.url, body("loose", **LONG)).start()
    until(
        lambda: "node-0's link: one fetch would miss its objective (tight)" in mesh.json("explain", "loose")["reason"],
        what="the second fetch waits for the link",
    )
    assert tight.result().text
    assert loose.result().text


def is_starting(mesh: Roomy, model: str) -> bool:
    return any(i["model"] == model for n in mesh.cluster()["nodes"] for i in n["instances"])
