"""Each process of a migration dies in each of its steps.

No stream ends early or differently, and no state is left over.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
from _pytest.mark.structures import ParameterSet

from tests.support.launcher import until
from tests.support.mesh import kill
from tests.support.moving import Roomy, Stream, body
from tests.support.moving_steps import Staged, Step
from tests.support.paced_zygote import Pace
from tests.support.sizes import size

TOKENS, STEP_S = size(200, 300), 0.5
"""Of a stream that is still running when every process is stopped at the wanted step, within 100 s:
engines are slow until then.
"""
BODIES: list[dict[str, Any]] = [
    body("one", max_tokens=TOKENS, ignore_eos=True),
    body("one", seed=3, max_tokens=TOKENS, ignore_eos=True),
    body("one", seed=4, max_tokens=TOKENS, ignore_eos=True),
]
NODES = ("node-0", "node-1")


@pytest.fixture(scope="module")
def mesh(pace: Pace) -> Iterator[Roomy]:
    thaw = Roomy(**pace.environment)
    try:
        thaw.begin(2, room=1.5, positions=4096, max_model_len=2560, max_concurrency=8)
        thaw.json("wake", "one")
        thaw.everywhere("one")
        yield thaw
    finally:
        thaw.close()


@pytest.fixture(scope="module")
def undisturbed(mesh: Roomy) -> list[Stream]:
    return [s.result() for s in [Stream(mesh.url, each).start() for each in BODIES]]


@pytest.fixture
def streams(mesh: Roomy, pace: Pace, undisturbed: list[Stream]) -> Iterator[list[Stream]]:
    """Keep streams running; at the end each equals its undisturbed run."""
    until(lambda: all(mesh.on("one", n) for n in NODES), what="an instance on each node")
    with pace.slowed(STEP_S):
        streams = [Stream(mesh.url, each).start() for each in BODIES]
        assert all(s.opened.wait(120) for s in streams)
        yield streams
    for stream, expected in zip(streams, undisturbed, strict=True):
        stream.result().assert_same(expected)
    mesh.assert_settled()


def _cases() -> list[ParameterSet]:
    """Return every victim in every step: half of them for `make test-long` alone."""
    quick = {
        ("asked", "source"), ("asked", "scheduler"), ("round", "migrator"), ("round", "destination"),
        ("handing_over", "migrator"), ("handing_over", "source"), ("handing_over", "scheduler"),
    }  # fmt: skip
    cases = itertools.product(("asked", "round", "handing_over"), ("migrator", "source", "destination", "scheduler"))
    return [pytest.param(*case, marks=() if case in quick else pytest.mark.long, id="-".join(case)) for case in cases]


@pytest.mark.parametrize(("step", "victim"), _cases())
def test_sigkill_of_a_participant_during_a_migration_loses_no_stream(
    mesh: Roomy, streams: list[Stream], step: Step, victim: str
) -> None:
    source, node = mesh.place("one", serving=True)
    to = NODES[1 - NODES.index(node)]
    (destination,) = mesh.on("one", to)
    pids = {"source": mesh.pid_of(source), "destination": mesh.pid_of(destination)}
    services = {name: mesh.pid(name) for name in ("migrator", "scheduler")}
    with Staged(mesh).at(step, source, to, pids["destination"]):
        kill((pids | services)[victim])


@pytest.mark.parametrize("victim", ["source", "destination"])
def test_sigkill_after_the_handover_loses_no_stream(mesh: Roomy, streams: list[Stream], victim: str) -> None:
    """The source or the destination dies after the hand-off.

    Requests that the destination has just received resume elsewhere; the source no longer has them.
    """
    source, node = mesh.place("one", serving=True)
    to = NODES[1 - NODES.index(node)]
    (destination,) = mesh.on("one", to)
    pids = {"source": mesh.pid_of(source), "destination": mesh.pid_of(destination)}
    (record,) = mesh.order(instance_id=source, node=to)["migrations"]
    assert record["state"] == "done", record
    with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):  # the source, which has no request, stops by itself
        kill(pids[victim])
