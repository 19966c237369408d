"""`thaw demo traffic` against a real mesh whose device has room for two models."""

from __future__ import annotations

import json

from tests.support.launcher import Thaw

SHARED = True


def test_traffic_of_three_models_on_a_device_for_two(mesh: Thaw) -> None:
    """Every request is answered, each model starts, and the registrations go with --remove."""
    before = {m["card"]["spec"]["name"] for m in mesh.cluster()["models"]}
    # A process of its own: making models leaves multiprocessing's resource tracker in it.
    options = ("--models", "3", "--seconds", "6", "--rate", "2", "--seed", "5", "--remove", "--json")
    done = mesh.run("demo", "traffic", *options)
    assert done.returncode == 0, done.stderr
    run = json.loads(done.stdout)
    assert run["failed"] == 0, run["errors"]
    assert run["requests"] == sum(row["requests"] for row in run["models"]) >= 6
    asked = [row for row in run["models"] if row["requests"]]
    assert len(asked) == 3
    assert all(row["cold"] >= 1 and row["cold_ttft_ms"] > 0 for row in asked)
    assert run["tokens"] >= run["requests"]
    assert {m["card"]["spec"]["name"] for m in mesh.cluster()["models"]} == before
