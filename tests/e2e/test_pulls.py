"""`thaw pull` on a mesh: cancelled in the middle, and while its scheduler is killed."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.loader.tiers_server import Faults, TierServer
from tests.support.launcher import Thaw, until
from thaw.demo.models import make_demo_model

SHARED = True
STALL_BYTES = 256 * 1024


@pytest.fixture
def server(tmp_path: Path) -> Iterator[TierServer]:
    """A web server with the model `far`, which sends slowly."""
    make_demo_model(tmp_path / "far", "test", seed=11)
    server = TierServer(tmp_path)
    server.faults.piece_delay_s = 0.2
    yield server
    server.close()


@pytest.fixture
def far(mesh: Thaw, server: TierServer) -> Iterator[str]:
    """The name of the registered model, of other weights in each test."""
    mesh.json("models", "add", "far", f"{server.url}/far")
    yield "far"
    mesh.json("models", "rm", "far")


def listed(mesh: Thaw) -> list[dict[str, Any]]:
    pulls: list[dict[str, Any]] = mesh.json("pull", "--list")["pulls"]
    return pulls


def await_half(mesh: Thaw, model: str) -> dict[str, Any]:
    """Return the pull of a model, when a part of it has arrived."""
    found: list[dict[str, Any]] = []

    def is_half_done() -> bool:
        found[:] = [p for p in listed(mesh) if p["model"] == model]
        return bool(found) and 0 < found[0]["loaded_bytes"] < found[0]["total_bytes"]

    until(is_half_done, what=f"a part of {model} has arrived")
    return found[0]


def loads(mesh: Thaw) -> list[str]:
    """Return the models of the loads in progress, as the loaders report them."""
    return [load["model"] for node in mesh.cluster()["nodes"] for load in node["loader"]["loads"]]


def test_a_pull_is_cancelled_in_the_middle_and_continues_when_it_is_repeated(mesh: Thaw, server: TierServer, far: str) -> None:
    server.faults.stall_after = STALL_BYTES
    with mesh.popen("pull", far) as waiting:
        pull = await_half(mesh, far)
        assert (pull["node"], pull["tier"], pull["state"]) == ("node-0", "ssd", "running")
        assert mesh.json("pull", far, "--cancel") == {"model": far, "cancelled": [{"node": "node-0", "tier": "ssd"}]}
        _, errors = waiting.communicate(timeout=120)
    assert (waiting.returncode, "was cancelled" in errors) == (1, True), errors
    assert listed(mesh) == []
    until(lambda: far not in loads(mesh), what="its memory is free")
    assert mesh.json("pull", far, "--cancel")["cancelled"] == []
    server.faults = Faults()
    server.unblocked.set()
    assert mesh.json("pull", far)["was_there"] is False
    assert mesh.json("pull", far)["was_there"] is True
    assert mesh.instances(far) == []


@pytest.mark.parametrize("waits", [True, False])
def test_a_pull_is_completed_after_its_scheduler_was_killed(mesh: Thaw, server: TierServer, waits: bool) -> None:
    model = f"far-{waits}".lower()
    make_demo_model(server.directory / model, "test", seed=12 + waits)
    server.faults.stall_after = STALL_BYTES
    mesh.json("models", "add", model, f"{server.url}/{model}")
    with mesh.popen("pull", model) as client:
        assert server.stalled.wait(60)
        await_half(mesh, model)
        if not waits:
            client.send_signal(signal.SIGINT)
            output, _ = client.communicate(timeout=120)
            assert (client.returncode, "--cancel" in output) == (130, True)
        mesh.await_replaced("scheduler", mesh.kill("scheduler"))
        assert [p["model"] for p in listed(mesh)] == [model]
        server.faults = Faults()
        server.unblocked.set()
        if waits:
            output, errors = client.communicate(timeout=120)
            assert (client.returncode, output.count("is in the disk cache")) == (0, 1), f"{output}{errors}"
    until(lambda: listed(mesh) == [], what="the pull is over")
    assert mesh.json("pull", model)["was_there"] is True
    mesh.json("models", "rm", model)
