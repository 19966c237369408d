"""The scheduler chooses the number of stages, through `thaw up`: where the objective needs a group.

Predictions are the scheduler's own, learned from a first load.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.paced_nodes import NODES, paced_nodes, paced_server, predicted_ms, register, register_for_group, stages_of
from tests.integration.loader.tiers_server import TierServer
from tests.support.launcher import until
from tests.support.moving import Roomy, Stream, body
from tests.support.sizes import size
from thaw.demo.models import Shape

LONG: dict[str, Any] = {"max_tokens": size(60, 200), "ignore_eos": True}
OPTIONS: dict[str, Any] = {"max_concurrency": 4, "keep_alive": -1}
SHAPE = Shape(1024, 128, 512, 8, 4, 2, 1024, "float32", 0.0)
PIECE_DELAY_S = 0.06
"""For each 64 KiB: some 8 s for the model's 9 MB, half of it for a stage."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TierServer]:
    with paced_server(tmp_path_factory.mktemp("www"), ("far", "near", "tight", "loose"), SHAPE, PIECE_DELAY_S) as found:
        yield found


@pytest.fixture(scope="module")
def mesh(server: TierServer) -> Iterator[Roomy]:
    with paced_nodes(server, OPTIONS, THAW_CONSOLIDATE="false") as found:
        yield found


def test_objective_that_one_node_misses_is_met_by_a_group_that_answers_as_one_engine(mesh: Roomy, server: TierServer) -> None:
    register_for_group(mesh, server, "far", OPTIONS)
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
    register(mesh, server, "near", 0.001, OPTIONS)
    register(mesh, server, "near", 10 * predicted_ms(mesh, "near")[1] / 1e3, OPTIONS)
    Stream(mesh.url, body("near", **LONG)).start().result()
    plan = mesh.json("explain", "near")
    assert plan["chosen"]["stages"] == 1, plan
    [group] = [c for c in plan["candidates"] if c["stages"] == 2]
    assert "one worker meets the objective" in group["excluded"]
    assert not stages_of(mesh, "near")


def test_fetch_waits_while_it_would_make_another_one_miss_its_objective(mesh: Roomy, server: TierServer) -> None:
    register(mesh, server, "loose", None, OPTIONS, "node-0/*")
    register(mesh, server, "tight", 0.001, OPTIONS, "node-0/*")
    [alone_ms] = [
        c["predicted_ms"] for c in mesh.json("explain", "tight", "--what-if", "drop-node=beside")["candidates"] if c["predicted_ms"]
    ]
    register(mesh, server, "tight", 1.25 * alone_ms / 1e3, OPTIONS, "node-0/*")
    tight = Stream(mesh.url, body("tight", **LONG)).start()
    until(lambda: is_starting(mesh, "tight"), what="the first model fetches")
    loose = Stream(mesh.url, body("loose", **LONG)).start()
    until(
        lambda: "node-0's link: one fetch would miss its objective (tight)" in latest_reason(mesh, "loose"),
        what="the second fetch waits for the link",
    )
    assert tight.result().text
    assert loose.result().text


def latest_reason(mesh: Roomy, model: str) -> str:
    """Return the reason of the model's latest plan; empty before there is one."""
    status, out = mesh.inside("explain", model, "--json")
    return str(json.loads(out)["reason"]) if status == 0 else ""


def is_starting(mesh: Roomy, model: str) -> bool:
    return any(i["model"] == model for n in mesh.cluster()["nodes"] for i in n["instances"])
