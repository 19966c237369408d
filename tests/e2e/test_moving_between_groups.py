"""A running response moves from one group in stages to another, through `thaw up`.

Four nodes have room for a stage each, so that two groups of two stages serve a model. A fifth one
computes the answer of one engine.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import psutil
import pytest

from tests.e2e.paced_nodes import instances
from tests.support.launcher import running, until
from tests.support.moving import STAGED_OPTIONS, Roomy, Stream, body, stage_budgets
from tests.support.paced_zygote import Pace
from tests.support.sizes import size
from thaw.demo.models import make_demo_model

NODES = ("node-0", "node-1", "node-2", "node-3")
LONG: dict[str, Any] = {"max_tokens": size(200, 400), "ignore_eos": True}
GENERATED = 40
"""Tokens whose keys and values the source has at least when the request moves."""
FIRST_STEP_S, STEP_S = 0.08, 0.3
"""The wait of each step until then, and from then on, until the test has seen what it waits for."""

Group = dict[int, dict[str, Any]]
"""Stages by index, each with its node."""


@pytest.fixture(scope="module")
def mesh(pace: Pace) -> Iterator[Roomy]:
    thaw = Roomy(THAW_DRAM_BYTES="0", THAW_MIGRATE_KV="always", **pace.environment)
    source = make_demo_model(thaw.home / "models" / "m", "test")
    stage, whole = stage_budgets(source)
    staged = {"name": "staged", "source": str(source), "stages": 2, "replicas": {"min": 2, "max": 2}}
    models: list[dict[str, Any]] = [
        {**staged, "placement": {"devices": ["node-*/*"]}},
        {"name": "single", "source": str(source), "placement": {"devices": ["whole/*"]}},
    ]
    nodes = {**{node: {"cpu:0": stage} for node in NODES}, "whole": {"cpu:0": whole}}
    with running(thaw, nodes, models, **STAGED_OPTIONS) as found:
        yield found


@pytest.fixture(scope="module")
def expected(mesh: Roomy) -> Stream:
    return Stream(mesh.url, body("single", **LONG)).start().result()


def find_groups(mesh: Roomy) -> list[Group]:
    """Return the groups whose stages are all ready, sorted by running requests, most first."""
    found: dict[str, Group] = {}
    for stage in instances(mesh, "staged"):
        if stage["state"] == "ready":
            found.setdefault(stage["group"]["first"], {})[stage["group"]["index"]] = stage
    return sorted((g for g in found.values() if sorted(g) == [0, 1]), key=lambda g: -g[0]["load"]["active"])


def await_groups(mesh: Roomy, *, serving: bool = False) -> tuple[Group, Group]:
    """Wait for both groups; with `serving` until one of them reports a request."""

    def are_there() -> bool:
        found = find_groups(mesh)
        return len(found) == 2 and (not serving or found[0][0]["load"]["active"] > 0)

    until(are_there, what="two groups are ready" + (", one of which serves" if serving else ""))
    first, second = find_groups(mesh)
    return first, second


@pytest.fixture
def reading(mesh: Roomy) -> Iterator[Stream]:
    """Start a stream, which the test slows down, and disconnect it in the end."""
    await_groups(mesh)
    stream = Stream(mesh.url, body("staged", **LONG))
    yield stream
    stream.leave()
    mesh.assert_settled()


def begin(mesh: Roomy, stream: Stream, pace: Pace) -> tuple[Group, Group]:
    """Start the stream; return the group that serves it, and the other one."""
    stream.start()
    until(lambda: len(stream.tokens) >= GENERATED, what=f"{GENERATED} tokens")
    pace.change(STEP_S)
    return await_groups(mesh, serving=True)


def test_request_moves_from_one_group_to_another_with_its_keys_and_values(
    mesh: Roomy, reading: Stream, expected: Stream, pace: Pace
) -> None:
    with pace.slowed(FIRST_STEP_S):
        _, other = begin(mesh, reading, pace)
        [record] = mesh.order(request_id=reading.request_id, node=other[0]["node"])["migrations"]
    reading.result().assert_same(expected)
    assert (record["state"], record["instance_id"]) == ("done", other[0]["instance_id"])
    assert [r["outcome"] for r in record["requests"]] == ["moved"]
    assert sum(r["kv_tokens"] for r in record["rounds"]) >= GENERATED, "both stages have received their layers"
    assert sum(r["tokens"] for r in record["rounds"]) < GENERATED, "the rest is computed"


def test_drain_of_a_node_with_a_later_stage_moves_the_requests_of_its_group(
    mesh: Roomy, reading: Stream, expected: Stream, pace: Pace
) -> None:
    before = set(mesh.records())
    with pace.slowed(FIRST_STEP_S):
        serving, other = begin(mesh, reading, pace)
        answer = mesh.json("node", "drain", serving[1]["node"])
        until(lambda: any(r.over for key, r in mesh.records().items() if key not in before), what="the migration is over")
    reading.result().assert_same(expected)
    [record] = [r for key, r in mesh.records().items() if key not in before]
    assert (record.state, record.reason, record.instance_id) == ("done", "drain", other[0]["instance_id"])
    assert (answer["ok"], answer["moved"], answer["left"]) == (True, 1, []), answer
    assert sum(r.kv_tokens for r in record.rounds) >= GENERATED
    until(lambda: len(find_groups(mesh)) == 1, what="the drained group has stopped")
    mesh.json("node", "uncordon", serving[1]["node"])
    await_groups(mesh)


@pytest.mark.parametrize(("side", "stage"), [("source", 1), ("destination", 0), ("destination", 1)])
def test_death_of_a_stage_during_the_migration_loses_no_token(
    mesh: Roomy, reading: Stream, expected: Stream, pace: Pace, side: str, stage: int
) -> None:
    """The stage is stopped when the order is given, so that the migration needs it, and killed."""
    with pace.slowed(FIRST_STEP_S):
        source, destination = begin(mesh, reading, pace)
        group = source if side == "source" else destination
        victim = psutil.Process(group[stage]["pids"][0])
        before = set(mesh.records())
        victim.send_signal(signal.SIGSTOP)
        try:
            order = threading.Thread(target=order_unless_refused, args=(mesh, reading, destination[0]["node"]))
            order.start()
            until(lambda: bool(set(mesh.records()) - before), what="the order is written")
        finally:
            os.kill(victim.pid, signal.SIGKILL)
    reading.result().assert_same(expected)
    order.join(120)
    assert not order.is_alive()
    replaced = {i["pids"][0] for g in await_groups(mesh) for i in g.values()}
    assert not replaced & {i["pids"][0] for i in group.values()}, "no half group is left"


def order_unless_refused(mesh: Roomy, stream: Stream, node: str) -> None:
    """Order the migration, which ends in any state, or with an error."""
    with contextlib.suppress(httpx.HTTPStatusError):
        mesh.order(request_id=stream.request_id, node=node)
