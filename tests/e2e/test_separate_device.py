"""A mesh whose node has a cpu device with memory of its own, beside a unified one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.device_memory import await_memory
from tests.support.launcher import Thaw, until
from thaw.demo.models import make_demo_model


@pytest.fixture(scope="module")
def mesh() -> Iterator[Thaw]:
    """Start a mesh with a model on each device, and a fine-tune of it on the separate one."""
    thaw = Thaw(THAW_DRAM_BYTES="0", THAW_VERIFY="true")
    base = make_demo_model(thaw.home / "models" / "base", "5m")
    tuned = fine_tune(base, make_demo_model(thaw.home / "models" / "tuned", "5m"))
    other = make_demo_model(thaw.home / "models" / "other", "5m", seed=1)
    models = {"base": (base, "cpu:1"), "tuned": (tuned, "cpu:1"), "unified": (base, "cpu:0")}
    large = {"large": base, "larger": other}
    (thaw.home / "thaw.yaml").write_text(
        f"mesh:\n  port: {thaw.port}\n  nodes:\n    node-0:\n"
        "      cpu:0: 700MiB\n      cpu:1: {size: 700MiB, memory: separate}\n"
        "defaults: {keep_alive: -1}\nmodels:\n"
        + "".join(f"  - {{name: {n}, source: {s}, placement: {{devices: [{d}]}}}}\n" for n, (s, d) in models.items())
        + "".join(
            f"  - {{name: {n}, source: {s}, placement: {{devices: ['cpu:1']}}, engine_args: {{kv_cache_bytes: 280MiB}}}}\n"
            for n, s in large.items()
        )
    )
    try:
        thaw.json("up", "--detach", "--config", str(thaw.home / "thaw.yaml"))
        yield thaw
    finally:
        thaw.close()


def fine_tune(base: Path, tuned: Path) -> Path:
    """Make `tuned` the base with another last norm."""
    content = bytearray((base / "model.safetensors").read_bytes())
    start = 8 + int.from_bytes(content[:8], "little")
    low, high = json.loads(content[8:start])["model.norm.weight"]["data_offsets"]
    content[start + low : start + high] = b"\x00\x40" * ((high - low) // 2)  # 2.0 in bfloat16
    (tuned / "model.safetensors").write_bytes(content)
    return tuned


def memory(mesh: Thaw) -> dict[str, Any]:
    return await_memory(mesh, "cpu:1")


def stop(mesh: Thaw, model: str) -> None:
    mesh.json("sleep", model)
    until(lambda: memory(mesh)["mapped_bytes"] == 0, what=f"no unit is mapped once {model} has stopped")


def text(mesh: Thaw, model: str) -> str:
    return str(mesh.json("chat", model, "Once upon a time", "--max-tokens", "12", "--temperature", "0")["text"])


def test_weights_stay_on_the_device_and_are_shared(mesh: Thaw) -> None:
    first = text(mesh, "base")
    loaded = memory(mesh)
    assert loaded["copied_bytes"] > 0
    assert text(mesh, "unified") == first
    stop(mesh, "base")
    assert memory(mesh)["reusable_bytes"] == loaded["mapped_bytes"]
    assert text(mesh, "base") == first
    again = memory(mesh)
    assert (again["copied_bytes"], again["mapped_bytes"]) == (loaded["copied_bytes"], loaded["mapped_bytes"])
    text(mesh, "tuned")
    both = memory(mesh)
    own_bytes = both["copied_bytes"] - loaded["copied_bytes"]
    assert 0 < own_bytes < loaded["copied_bytes"] // 2
    assert both["mapped_bytes"] < loaded["mapped_bytes"] * 3 // 2
    assert {m["model"]: m["shared_bytes"] > 0 for m in both["models"]} == {"base": True, "tuned": True}
    audit = mesh.json("doctor")["audits"]["node-0"]
    assert [(d["device_id"], d["violations"], len(d["instances"])) for d in audit] == [("cpu:1", [], 2)]


def test_models_whose_whole_caches_exceed_the_device_run_together(mesh: Thaw) -> None:
    """Of 700 MiB each books 202 MiB and a floor, and both together 278 MiB of growth."""
    for model in ("base", "tuned"):
        mesh.json("sleep", model)
    first = {model: text(mesh, model) for model in ("large", "larger")}
    assert {model: text(mesh, model) for model in first} == first
    both = memory(mesh)
    assert [k["model"] for k in both["kv"]] == ["large", "larger"]
    assert all(k["lent_bytes"] >= k["floor_bytes"] == 2 << 20 for k in both["kv"])
    assert sum(k["lent_bytes"] for k in both["kv"]) == both["lent_bytes"]
    [node] = mesh.json("ps")["nodes"]
    [device] = [d for d in node["devices"] if d["device_id"] == "cpu:1"]
    assert 2 * (280 << 20) < device["reserved_bytes"] <= device["budget_bytes"]
    assert not mesh.json("doctor")["audits"]["node-0"][0]["violations"]
