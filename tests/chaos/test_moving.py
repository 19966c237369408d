"""Whoever has to do with a move dies in the middle of it: no stream ends early or differently, and nothing is left over."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.support.launcher import until
from tests.support.mesh import kill
from tests.support.moving import Roomy, Stream, body

BODIES: list[dict[str, Any]] = [
    body("one", max_tokens=900),
    body("one", seed=3, max_tokens=900),
    body("one", seed=4, max_tokens=900),
]


@pytest.fixture(scope="module")
def mesh() -> Iterator[Roomy]:
    thaw = Roomy()
    try:
        thaw.begin(2, room=1.5, max_model_len=1024, max_concurrency=8)
        thaw.json("wake", "one")
        thaw.everywhere("one")
        yield thaw
    finally:
        thaw.close()


@pytest.fixture(scope="module")
def undisturbed(mesh: Roomy) -> list[Stream]:
    return [s.result() for s in [Stream(mesh.url, each).start() for each in BODIES]]


class Order(threading.Thread):
    """One that may never be answered."""

    def __init__(self, mesh: Roomy, **fields: Any) -> None:
        super().__init__(name="order", daemon=True)
        self.mesh, self.fields = mesh, fields
        self.start()

    def run(self) -> None:
        try:
            self.mesh.order(**self.fields)
        except httpx.HTTPError:
            return


@pytest.mark.parametrize("victim", ["migrator", "source", "destination", "scheduler"])
def test_who_moves_dies(mesh: Roomy, undisturbed: list[Stream], victim: str) -> None:
    until(lambda: all(mesh.on("one", n) for n in ("node-0", "node-1")), what="an instance on each node")
    streams = [Stream(mesh.url, each).start() for each in BODIES]
    assert all(s.opened.wait(60) for s in streams)
    source, node = mesh.place("one")
    (destination,) = mesh.on("one", "node-1" if node == "node-0" else "node-0")
    pids = {i["instance_id"]: i["pids"][0] for n in mesh.json("ps")["nodes"] for i in n["instances"] if i["pids"]}
    Order(mesh, instance_id=source, node="node-1" if node == "node-0" else "node-0")
    until(lambda: bool(mesh.json("ps")["migrations"]) or all(s.done for s in streams), what="the move has begun")
    kill({"source": pids[source], "destination": pids[destination]}.get(victim) or mesh.pid(victim))
    for stream, expected in zip(streams, undisturbed, strict=True):
        stream.result().assert_same(expected)
