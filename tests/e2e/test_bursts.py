"""A burst of requests to a cold model starts two groups, each of which becomes an instance.

Four nodes fetch over paced links, through `thaw up`. A fifth one has the answers of one engine.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.paced_nodes import consolidations, instances, paced_nodes, paced_server, start_in_groups
from tests.integration.loader.tiers_server import TierServer
from tests.support.launcher import until
from tests.support.moving import Roomy, Stream, body
from tests.support.paced_zygote import Pace
from thaw.demo.models import Shape

NODES = ("node-0", "node-1", "node-2", "node-3")
STEP_S = 0.4
STREAMS = 8
"""A group runs two at once, and gateways send two more to its queue: one group has half of them."""
OPTIONS: dict[str, Any] = {"max_concurrency": 2, "max_model_len": 2_500, "keep_alive": -1}
SHAPE = Shape(1024, 128, 512, 8, 4, 2, 4_096, "float32", 0.0)
PIECE_DELAY_S = 0.08
"""For each 64 KiB: some 12 s for the model's 9 MB, half of it for a stage. The other half is the
time that a busy machine has until both groups are placed.
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TierServer]:
    with paced_server(tmp_path_factory.mktemp("www"), ("far",), SHAPE, PIECE_DELAY_S, NODES) as found:
        yield found


@pytest.fixture(scope="module")
def mesh(server: TierServer, pace: Pace) -> Iterator[Roomy]:
    with paced_nodes(server, OPTIONS, NODES, THAW_CACHE_BYTES="0", **pace.environment) as found:
        yield found


def stages(mesh: Roomy, *states: str) -> list[dict[str, Any]]:
    return [i for i in instances(mesh) if i["group"] is not None and i["state"] in (states or (i["state"],))]


def whole(mesh: Roomy) -> list[dict[str, Any]]:
    return [i for i in instances(mesh) if i["group"] is None and i["state"] == "ready"]


def firsts(mesh: Roomy) -> set[str]:
    """Return the groups that have a stage."""
    return {i["group"]["first"] for i in stages(mesh)}


def describe_plan(mesh: Roomy) -> str:
    """Return the model's instances, and why its last start is where it is."""
    plan = mesh.json("explain", "far")
    held = [(i["instance_id"], i["state"], i["pids"]) for i in instances(mesh)]
    return f"{held}; {plan['reason']}; {[(c['stages'], c['predicted_ms'], c['excluded']) for c in plan['candidates']]}"


@pytest.fixture
def asked(mesh: Roomy, server: TierServer) -> Iterator[list[tuple[dict[str, Any], Stream]]]:
    """Return requests, and their answers by one engine; remove the model in the end."""
    questions: list[dict[str, Any]] = [
        {"prompt": f"Once upon a time {n}", "max_tokens": 75, "ignore_eos": True} for n in range(STREAMS)
    ]
    alone = [Stream(mesh.url, body("single", **one)).start() for one in questions]
    for stream in alone:
        stream.result()
    try:
        yield list(zip(questions, alone, strict=True))
    finally:
        mesh.json("sleep", "far")
        mesh.json("models", "rm", "far")
        until(lambda: not instances(mesh), what="the model's memory is given back")


def start_burst(mesh: Roomy, server: TierServer, asked: list[tuple[dict[str, Any], Stream]]) -> list[Stream]:
    """Start streams of all requests, for which two groups of two start."""
    options = OPTIONS | {"replicas": {"min": 0, "max": 2}}
    return start_in_groups(
        mesh, server, "far", options, lambda: [Stream(mesh.url, body("far", **one)).start() for one, _ in asked], stages=4
    )


def test_burst_is_answered_by_two_groups_and_then_by_two_instances(
    mesh: Roomy, server: TierServer, pace: Pace, asked: list[tuple[dict[str, Any], Stream]]
) -> None:
    before = set(mesh.records())
    with pace.slowed(STEP_S):
        streams = start_burst(mesh, server, asked)
        assert len(firsts(mesh)) == 2
        assert not whole(mesh)
        assert sorted(i["node"] for i in stages(mesh)) == sorted(NODES), "each stage has a link of its own"
        until(lambda: len(stages(mesh, "ready")) == 4, what="both groups are ready")
        until(lambda: not stages(mesh) and len(whole(mesh)) == 2, what="each group has become an instance")
        moved = [r for r in consolidations(mesh) if r.migration_id not in before]
        assert len({r.source_instance for r in moved}) == 2
        assert {r.instance_id for r in moved} == {i["instance_id"] for i in whole(mesh)}
    for stream, (_, alone) in zip(streams, asked, strict=True):
        stream.result().assert_same(alone)
    mesh.assert_settled()


def test_group_that_dies_while_both_start_leaves_the_other_one_to_answer(
    mesh: Roomy, server: TierServer, pace: Pace, asked: list[tuple[dict[str, Any], Stream]]
) -> None:
    with pace.slowed(STEP_S):  # a group that starts earlier than the other one does not answer all
        streams = start_burst(mesh, server, asked)
        until(lambda: len([i for i in stages(mesh) if i["pids"]]) == 4, what=lambda: f"two groups start: {describe_plan(mesh)}")
        victim = next(i for i in stages(mesh) if i["pids"] and i["group"]["index"] == 1)
        os.kill(victim["pids"][0], signal.SIGKILL)
    for stream, (_, alone) in zip(streams, asked, strict=True):
        stream.result().assert_same(alone)
    until(lambda: victim["group"]["first"] not in firsts(mesh), what="no half group is left")
    mesh.assert_settled()
