"""A model is started on a device by copies from another device, whose engine keeps generating.

The mesh verifies all reused units and all copies: a changed unit is found, reported, and not used.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.device_memory import await_memory, read_memory
from tests.support.launcher import Thaw, running, until
from tests.support.moving import Stream, body
from tests.support.paced_zygote import Pace
from tests.support.sizes import size
from thaw.demo.models import Shape, make_demo_model

SHAPE = Shape(4096, 256, 1024, 6, 4, 2, 1024, "float32", 0.0)
"""Weights of 28 MiB: units of 2 to 4 MiB."""
LONG, STEP_S = {"max_tokens": size(300, 900), "ignore_eos": True}, 0.3
"""A stream that outlasts the start of an engine, as long as its steps are slow."""


@pytest.fixture(scope="module")
def pace(tmp_path_factory: pytest.TempPathFactory) -> Pace:
    return Pace(tmp_path_factory.mktemp("pace"))


@pytest.fixture(scope="module")
def mesh(pace: Pace) -> Iterator[Thaw]:
    """The model `here` has its units on cpu:0; `there` is the same model for cpu:1."""
    thaw = Thaw(THAW_DRAM_BYTES="0", THAW_VERIFY="true", **pace.environment)
    source = make_demo_model(thaw.home / "models" / "m", SHAPE)
    devices = {
        "cpu:0": {"size": "400MiB", "memory": "separate"},
        # The copy takes a quarter of a minute: the test sees it under way, also on a busy machine.
        "cpu:1": {"size": "400MiB", "memory": "separate", "bandwidth": {"host": "512KiB/s", "cpu:0": "1536KiB/s"}},
    }
    models = [
        {"name": name, "source": str(source), "placement": {"devices": [device]}, "max_concurrency": 4}
        for name, device in (("here", "cpu:0"), ("there", "cpu:1"))
    ]
    with running(thaw, {"node-0": devices}, models) as found:
        yield found


def stream(mesh: Thaw, model: str, **more: Any) -> Stream:
    return Stream(mesh.url, body(model, **{"max_tokens": 12, **more})).start()


def stop(mesh: Thaw, model: str, device: str) -> None:
    mesh.json("sleep", model)
    until(lambda: read_memory(mesh, device)["mapped_bytes"] == 0, what=f"no unit is mapped once {model} has stopped")


def assert_audited(mesh: Thaw) -> None:
    audits = mesh.json("doctor")["audits"]["node-0"]
    assert [(a["device_id"], a["violations"]) for a in audits] == [("cpu:0", []), ("cpu:1", [])]


def test_a_model_is_copied_from_a_device_whose_engine_keeps_generating(mesh: Thaw, pace: Pace) -> None:
    expected = stream(mesh, "here").result()
    undisturbed = stream(mesh, "here", **LONG).result()
    assert expected.done
    assert undisturbed.done
    # Started again, it takes its units from the device: host memory does not have them any more.
    stop(mesh, "here", "cpu:0")
    assert stream(mesh, "here").result().text == expected.text
    weights = await_memory(mesh, "cpu:0")
    assert weights["reused_bytes"] == weights["copied_bytes"] > 0

    with pace.slowed(STEP_S):
        holder = stream(mesh, "here", **LONG)
        assert holder.opened.wait(120)
        copied = stream(mesh, "there")
        until(lambda: 0 < read_memory(mesh, "cpu:1")["peer_bytes"] < weights["copied_bytes"] // 2, what="a part is copied")
        tokens_before = len(holder.tokens)
        assert not copied.tokens, "it cannot answer before all is copied"
        copied.result().assert_same(expected)
        assert len(holder.tokens) > tokens_before, "the holder generates during the copy"
        assert not holder.done
    holder.result().assert_same(undisturbed)

    there = await_memory(mesh, "cpu:1")
    assert there["copied_bytes"] == weights["copied_bytes"], "every unit was copied, once"
    assert there["peer_bytes"] > there["copied_bytes"] // 2
    chosen = mesh.plan("there")["chosen"]
    assert (chosen["ready_by"], chosen["device_ids"], chosen["peers"]) == ("peer_copy", ["cpu:1"], ["cpu:0"])
    assert chosen["peer_bytes"] > chosen["weights_bytes"] // 2
    status, explained = mesh.inside("explain", "there")
    assert (status, "peer copy" in explained) == (0, True), explained
    load = mesh.json("trace", copied.request_id)["load"]
    assert load["plan_id"] == mesh.plan("there")["plan_id"]
    assert "load" in {s["phase"] for s in load["spans"]}, load
    assert_audited(mesh)


def test_a_changed_unit_is_found_reported_and_not_served(mesh: Thaw) -> None:
    expected = stream(mesh, "here").result()
    stop(mesh, "here", "cpu:0")
    stop(mesh, "there", "cpu:1")
    assert changed_units(mesh) == {"cpu:0": 0, "cpu:1": 0}
    damage(mesh, "cpu:0")
    stream(mesh, "here").result().assert_same(expected)
    assert changed_units(mesh) == {"cpu:0": 1, "cpu:1": 0}
    log = (mesh.home / "logs" / "loader.node-0.log").read_text()
    assert "the bytes of a reused unit have changed; it is copied again" in log
    # The device does not have the changed unit any more: the next start finds all as they were.
    stop(mesh, "here", "cpu:0")
    stream(mesh, "here").result().assert_same(expected)
    stream(mesh, "there").result().assert_same(expected)
    assert changed_units(mesh) == {"cpu:0": 1, "cpu:1": 0}
    assert_audited(mesh)


def damage(mesh: Thaw, device: str) -> None:
    """Change bytes in the middle of the weights, in the device's memory."""
    [pages] = [p for p in mesh.segments() if f"-pages-{device.replace(':', '')}-" in p.name]
    content = (mesh.home / "models" / "m" / "model.safetensors").read_bytes()
    middle = content[len(content) // 2 :][:64]
    assert len(set(middle)) > 8, "random bytes, which are nowhere else"
    at = pages.read_bytes().find(middle)
    assert at >= 0
    with pages.open("r+b") as file:
        file.seek(at)
        file.write(bytes(64))


def changed_units(mesh: Thaw) -> dict[str, int]:
    """Return the devices' numbers of changed units, which `thaw doctor` warns of."""
    report = mesh.json("doctor")
    audits = report["audits"]["node-0"]
    warnings = [f for f in report["findings"] if "changed bytes" in json.dumps(f)]
    assert bool(warnings) == any(a["changed_units"] for a in audits), report["findings"]
    return {a["device_id"]: a["changed_units"] for a in audits}
