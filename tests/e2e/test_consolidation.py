"""A group that the scheduler chose becomes one instance while a client reads, through `thaw up`.

Two nodes fetch over paced links. A third one computes the answer of one
engine.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from tests.e2e.paced_nodes import (
    NODES,
    consolidations,
    instances,
    paced_nodes,
    paced_server,
    register,
    stages_of,
    start_in_groups,
)
from tests.integration.loader.tiers_server import TierServer
from tests.support.launcher import until
from tests.support.mesh import held
from tests.support.moving import Roomy, Stream, body
from tests.support.paced_zygote import Pace
from tests.support.sizes import size
from thaw.demo.models import Shape

CONTEXT = 4_096
STEP_S = 0.4
LONG: dict[str, Any] = {"max_tokens": size(250, 400), "ignore_eos": True}
"""More than a minute and a half at the slow pace: longer than the start of a group, of its
successor, and the migration, also on a busy machine. Few tokens cost little CPU time.
"""
TPOT_S = 1.25 * STEP_S
"""One engine meets it. Of a group's two stages both must be full workers: by Eq. 2 a full worker
computes its stage in half of the model's time, and another one at worst in all of it.
"""
MEASURED = 25
"""Tokens in which the scheduler measures the time per token: some ten reports."""
STREAMS = 6
"""Under load: two run in the group, two wait in its queue, and two at the gateway."""
OPTIONS: dict[str, Any] = {"max_concurrency": 2, "max_model_len": 2_500, "keep_alive": -1}
SHAPE = Shape(1024, 128, 512, 8, 4, 2, CONTEXT, "float32", 0.0)
KV_TOKEN_BYTES = 2 * SHAPE.layers * SHAPE.kv_heads * (SHAPE.hidden // SHAPE.heads) * 4
"""Keys and values of a token in all layers of the model, in float32."""
PIECE_DELAY_S = 0.04
"""For each 64 KiB: some 6 s for the model's 9 MB, half of it for a stage. Tests see a group before
its successor is there, also on a busy machine.
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TierServer]:
    with paced_server(tmp_path_factory.mktemp("www"), ("far",), SHAPE, PIECE_DELAY_S) as found:
        yield found


@pytest.fixture(scope="module")
def mesh(server: TierServer, pace: Pace) -> Iterator[Roomy]:
    with paced_nodes(server, OPTIONS, THAW_CACHE_BYTES="0", THAW_MIGRATE_KV="always", **pace.environment) as found:
        yield found


@pytest.fixture(scope="module")
def expected(mesh: Roomy) -> Stream:
    return Stream(mesh.url, body("single", **LONG)).start().result()


def forget(mesh: Roomy) -> None:
    """Remove the model, and wait until the nodes have their memory back."""
    mesh.json("sleep", "far")
    mesh.json("models", "rm", "far")
    until(lambda: not any(reserved(mesh)[n] for n in NODES), what="the memory of the model is given back")


def reserved(mesh: Roomy) -> dict[str, int]:
    """Return the reserved bytes of each node."""
    return {n["node"]: sum(d["reserved_bytes"] for d in n["devices"]) for n in mesh.cluster()["nodes"]}


@pytest.fixture
def slow(pace: Pace) -> Iterator[contextlib.ExitStack]:
    """Slow the engines down until the test closes this, or ends."""
    with contextlib.ExitStack() as found:
        found.enter_context(pace.slowed(STEP_S))
        yield found


@pytest.fixture
def before(mesh: Roomy) -> set[str]:
    """Return the migrations before the test's group starts."""
    return set(mesh.records())


@pytest.fixture
def grouped(mesh: Roomy, server: TierServer, expected: Stream, slow: contextlib.ExitStack, before: set[str]) -> Iterator[Stream]:
    """Start a slow stream for which the scheduler chooses a group, and wait until that serves."""
    [stream] = start_in_groups(mesh, server, "far", OPTIONS, lambda: [Stream(mesh.url, body("far", **LONG)).start()])
    try:
        assert stream.opened.wait(120)
        until(lambda: sorted(stages_of(mesh, "far")) == [0, 1], what="a group serves")
        yield stream
    finally:
        stream.leave()
        forget(mesh)


def whole(mesh: Roomy, *states: str) -> list[dict[str, Any]]:
    return [i for i in instances(mesh) if i["group"] is None and i["state"] in states]


def is_one_instance(mesh: Roomy) -> bool:
    found = instances(mesh)
    return len(found) == 1 and found[0]["group"] is None and found[0]["state"] == "ready"


def test_stream_runs_through_consolidation_and_the_memory_of_the_group_is_given_back(
    mesh: Roomy, grouped: Stream, expected: Stream, slow: contextlib.ExitStack, before: set[str]
) -> None:
    nodes = set(stages_of(mesh, "far").values())
    until(lambda: bool(whole(mesh, "preparing", "loading", "ready")), what="a whole instance starts")
    until(lambda: is_one_instance(mesh), what="the group has stopped")
    assert not grouped.done, "the client still reads"
    slow.close()
    [one] = instances(mesh)
    assert one["node"] in nodes
    grouped.result().assert_same(expected)
    [record] = [r for r in consolidations(mesh) if r.migration_id not in before]
    assert (record.state, record.instance_id) == ("done", one["instance_id"])
    assert [m.outcome for m in record.requests] == ["moved"]
    assert sum(r.kv_tokens for r in record.rounds) > sum(r.tokens for r in record.rounds), "both stages have sent their layers"
    assert all(r.kv_bytes == r.kv_tokens * KV_TOKEN_BYTES for r in record.rounds if not r.kv_reason)
    plan = mesh.json("explain", "far")
    assert plan["trigger"] == "consolidation"
    assert "becomes one instance" in plan["reason"]
    mesh.assert_settled()
    held_there = reserved(mesh)
    assert held_there[one["node"]] == one["memory"]["reserved"]
    assert held_there[next(n for n in NODES if n != one["node"])] == 0


def test_objective_for_further_tokens_is_met_by_full_workers_that_become_one_instance(
    mesh: Roomy, server: TierServer, expected: Stream, slow: contextlib.ExitStack
) -> None:
    register(mesh, server, "far", 1_000.0, OPTIONS, tpot=TPOT_S)
    try:
        one_engine = Stream(mesh.url, body("far", max_tokens=MEASURED, ignore_eos=True)).start().result()
        assert one_engine.tokens == expected.tokens[:MEASURED]
        mesh.json("sleep", "far")
        [stream] = start_in_groups(
            mesh, server, "far", OPTIONS, lambda: [Stream(mesh.url, body("far", **LONG)).start()], tpot=TPOT_S
        )
        assert stream.opened.wait(120)
        until(lambda: sorted(stages_of(mesh, "far")) == [0, 1], what="a group serves")
        nodes = set(stages_of(mesh, "far").values())
        plan = mesh.json("explain", "far")
        assert (plan["chosen"]["stages"], plan["chosen"]["full_workers"]) == (2, 2), plan
        until(lambda: is_one_instance(mesh), what="the group has become one instance")
        assert instances(mesh)[0]["node"] in nodes
        slow.close()
        stream.result().assert_same(expected)
        mesh.assert_settled()
    finally:
        forget(mesh)


def test_death_of_the_successor_during_its_start_leaves_the_group_and_it_is_tried_again(
    mesh: Roomy, grouped: Stream, expected: Stream, slow: contextlib.ExitStack
) -> None:
    killed: set[str] = set()

    def is_killed() -> bool:
        found = [i for i in whole(mesh, "preparing", "loading") if i["pids"]]
        for successor in found:
            psutil.Process(successor["pids"][0]).kill()
        killed.update(i["instance_id"] for i in found)
        return bool(found)

    until(is_killed, what="the successor's process starts")
    until(lambda: not killed & {i["instance_id"] for i in instances(mesh)}, what="its start has failed")
    assert sorted(stages_of(mesh, "far")) == [0, 1], "the group serves on"
    slow.close()
    grouped.result().assert_same(expected)
    until(lambda: is_one_instance(mesh), what="the group is consolidated in the end")
    mesh.assert_settled()


@pytest.mark.parametrize("victim", [0, 1])
def test_death_of_a_stage_during_the_migration(
    mesh: Roomy, grouped: Stream, expected: Stream, slow: contextlib.ExitStack, before: set[str], victim: int
) -> None:
    """The migrator is stopped until the stage is gone: the successor computes the tokens."""
    with held(mesh.pid("migrator")):
        until(lambda: bool({r.migration_id for r in consolidations(mesh)} - before), what="the order is written")
        pids = {i["group"]["index"]: i["pids"][0] for i in instances(mesh) if i["group"] is not None}
        processes = [psutil.Process(pid) for pid in pids.values()]
        os.kill(pids[victim], signal.SIGKILL)
        assert not psutil.wait_procs(processes, timeout=60)[1], "no half group is left"
    slow.close()
    grouped.result().assert_same(expected)
    until(lambda: is_one_instance(mesh), what="the successor serves alone")
    mesh.assert_settled()


def test_under_load_every_stage_becomes_a_whole_instance_and_no_request_restarts(
    mesh: Roomy, server: TierServer, pace: Pace
) -> None:
    asked: list[dict[str, Any]] = [
        {"prompt": f"Once upon a time {n}", "max_tokens": size(75, 150), "ignore_eos": True} for n in range(STREAMS)
    ]
    undisturbed = [Stream(mesh.url, body("single", **one)).start() for one in asked]
    for stream in undisturbed:
        stream.result()
    before = set(mesh.records())

    def has_moved() -> bool:
        return any(m.outcome == "moved" for r in consolidations(mesh) if r.migration_id not in before for m in r.requests)

    try:
        with pace.slowed(STEP_S):
            streams = start_in_groups(
                mesh,
                server,
                "far",
                OPTIONS | {"replicas": {"min": 0, "max": 2}},
                lambda: [Stream(mesh.url, body("far", **one)).start() for one in asked],
            )
            until(lambda: sorted(stages_of(mesh, "far")) == [0, 1], what="a group serves")
            until(lambda: {i["node"] for i in whole(mesh, "ready")} == set(NODES), what="each node has a whole instance")
            until(lambda: all(i["load"]["active"] for i in whole(mesh, "ready")), what="both serve")
            until(has_moved, what="a request of the group has moved")
        for stream, alone in zip(streams, undisturbed, strict=True):
            stream.result().assert_same(alone)
        until(lambda: not any(i["group"] for i in instances(mesh)), what="the group has stopped")
        assert len(whole(mesh, "ready")) == 2
    finally:
        forget(mesh)
