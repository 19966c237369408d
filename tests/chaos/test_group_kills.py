"""Random kills over a group in every phase of its life: no response is lost, or different.

Phases: the group's start, serving, the start of its successors and the migration to them, with one
stream (consolidation to one instance) and under load (each stage becomes a whole instance).
"""

from __future__ import annotations

import logging
import os
import random
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any, Final

import psutil
import pytest

from tests.e2e.paced_nodes import NODES, consolidations, instances, paced_nodes, paced_server, register_for_group, stages_of
from tests.integration.loader.tiers_server import TierServer
from tests.support.launcher import until
from tests.support.moving import Roomy, Stream, body
from thaw.demo.models import Shape

log = logging.getLogger(__name__)
KILLS = int(os.environ.get("THAW_TEST_GROUP_KILLS", "30"))
SEED = 19
STREAMS = 4
OPTIONS: dict[str, Any] = {"max_concurrency": 2, "max_model_len": 2_500, "keep_alive": -1}
LOADED: dict[str, Any] = OPTIONS | {"replicas": {"min": 0, "max": 2}}
SHAPE = Shape(1024, 128, 512, 8, 4, 2, 4_096, "float32", 0.0)
PIECE_DELAY_S = 0.02
PHASES: Final = ("start", "serving", "successor", "migration")
VICTIMS: Final = ("stage 0", "stage 1", "successor", "loader", "nodeagent", "migrator", "scheduler")
"""A gateway is not one of them: a stream ends with its gateway (docs/failover.md)."""
SPREAD_S = 0.5
"""The kill follows the phase's beginning after a random time of up to this."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TierServer]:
    with paced_server(tmp_path_factory.mktemp("www"), ("far",), SHAPE, PIECE_DELAY_S) as found:
        yield found


@pytest.fixture(scope="module")
def mesh(server: TierServer) -> Iterator[Roomy]:
    with paced_nodes(server, OPTIONS, THAW_CACHE_BYTES="0") as found:
        yield found


def asked(number: int) -> dict[str, Any]:
    return {"prompt": f"Once upon a time {number}", "max_tokens": 1_000, "ignore_eos": True}


@pytest.fixture(scope="module")
def expected(mesh: Roomy) -> list[Stream]:
    """Return the undisturbed streams, of the node that no kill reaches."""
    streams = [Stream(mesh.url, body("single", **asked(n))).start() for n in range(STREAMS)]
    return [stream.result() for stream in streams]


def is_in(phase: str, mesh: Roomy, before: set[str]) -> bool:
    """Return whether the group's life has reached the phase, or has passed it."""
    if phase == "migration":
        return bool({r.migration_id for r in consolidations(mesh)} - before)
    found = instances(mesh)
    if phase == "start":
        return any(i["group"] is not None for i in found)
    has_successor = any(i["group"] is None for i in found)
    return has_successor if phase == "successor" else has_successor or sorted(stages_of(mesh, "far")) == [0, 1]


def find_victims(mesh: Roomy, picked: random.Random) -> dict[str, int]:
    """Return the pids of the possible victims by kind."""
    found: dict[str, int] = {}
    for instance in instances(mesh):
        kind = "successor" if instance["group"] is None else f"stage {instance['group']['index']}"
        if instance["pids"]:
            found[kind] = int(instance["pids"][0])
    node = picked.choice(NODES)
    for kind, service in (
        ("loader", f"loader.{node}"),
        ("nodeagent", f"nodeagent.{node}"),
        ("migrator", "migrator"),
        ("scheduler", "scheduler"),
    ):
        found[kind] = mesh.pid(service)
    return found


def kill_one(mesh: Roomy, picked: random.Random) -> str:
    """Kill a random victim, each kind as likely as the others; return its kind."""
    while True:
        found = find_victims(mesh, picked)
        kind = picked.choice([k for k in VICTIMS if k in found])
        try:
            psutil.Process(found[kind]).kill()
        except psutil.NoSuchProcess:  # it has ended since the view
            continue
        return kind


def measure(mesh: Roomy) -> None:
    """Let the loaders measure their links: one that was killed has forgotten its own."""
    for node in NODES:
        mesh.json("wake", f"probe-{node}")
        mesh.json("sleep", f"probe-{node}")


def is_whole(mesh: Roomy) -> bool:
    """Return whether the model has instances, and each is whole and ready."""
    found = instances(mesh)
    return bool(found) and all(i["group"] is None and i["state"] == "ready" for i in found)


def live_once(
    mesh: Roomy, server: TierServer, expected: list[Stream], phase: str, picked: random.Random, done: Counter[str]
) -> None:
    """Run one group from its first request to its end, with one kill."""
    is_loaded = picked.random() < 0.5
    register_for_group(mesh, server, "far", LOADED if is_loaded else OPTIONS)
    before = {r.migration_id for r in consolidations(mesh)}
    count = STREAMS if is_loaded else 1
    streams = [Stream(mesh.url, body("far", **asked(n))).start() for n in range(count)]
    try:
        until(lambda: is_in(phase, mesh, before) or all(s.done for s in streams), what=f"the group is in its {phase}")
        time.sleep(picked.uniform(0, SPREAD_S))  # what is tested: a random moment
        kind = kill_one(mesh, picked)
        done[f"{phase}, {kind}"] += 1
        log.info("killed a %s in the %s, %d streams: number %d", kind, phase, count, done.total())
        for stream, alone in zip(streams, expected, strict=False):
            stream.result().assert_same(alone)
        until(lambda: is_whole(mesh), what=f"whole instances serve after the kill of a {kind} in the {phase}")
        mesh.assert_settled()
    finally:
        for stream in streams:
            stream.leave()
        mesh.json("sleep", "far")
        mesh.json("models", "rm", "far")
    until(lambda: not instances(mesh), what="the model's instances have ended")
    mesh.assert_settled()
    if kind in ("loader", "nodeagent"):
        measure(mesh)


@pytest.mark.long
@pytest.mark.timeout(300 + 90 * KILLS)
def test_random_kills_over_a_group_lose_nothing(mesh: Roomy, server: TierServer, expected: list[Stream]) -> None:
    picked, done = random.Random(SEED), Counter[str]()
    for number in range(KILLS):
        live_once(mesh, server, expected, PHASES[number % len(PHASES)], picked, done)
    assert done.total() == KILLS
