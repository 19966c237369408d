"""The simulator replays a recorded run of a real mesh with its measurements.

The starts and their order are the same, and mean TTFT is within 15 %.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import yaml

from bench.fidelity import FIRST, collect_traces, filter_export
from bench.fidelity_replay import NAMES, compare_replay
from shared.contracts.traces import LoadTrace, RequestTrace
from tests.support.launcher import Thaw, until
from thaw.demo.models import make_demo_model

POLICY = "lru"
"""Victims do not depend on measurements: the replay must start the same models in order."""
# Two of three models fit: each model that is not among the last two needs a start.
ORDER = (0, 1, 0, 2, 2, 1, 0, 0, 1, 2, 1, 1, 0, 2, 0, 1)
STARTS = 9
PAUSE_S = 0.3


def test_a_recorded_run_is_replayed(mesh: Thaw, client: openai.OpenAI, admin: httpx.Client, tmp_path: Path) -> None:
    # The very first start includes the zygote's own, for another model that the scheduler no longer
    # knows afterwards.
    mesh.json("models", "add", FIRST, str(make_demo_model(tmp_path / FIRST, "test", seed=9)))
    ask(client, FIRST)
    mesh.json("sleep", FIRST)
    mesh.json("models", "rm", FIRST)
    export = tmp_path / "run.jsonl"
    record(mesh, client, admin, export)
    found = compare_replay(*collect(mesh, export), export, policy=POLICY, overlap=False)
    report = json.dumps(found, indent=1)
    assert found["requests"] == len(ORDER), report
    # No request joined a start: each one waited for the previous response.
    assert len(found["starts"]["mesh"]) == found["cold"]["mesh"] == STARTS, report
    assert found["start_by_start"]["starts"] == found["starts"]["mesh"], report
    assert len(found["starts"]["simulator"]) == len(found["starts"]["mesh"]), report
    assert abs(found["ttft_mean_s"]["error"]) <= 0.15, report


def record(mesh: Thaw, client: openai.OpenAI, admin: httpx.Client, export: Path) -> None:
    """Send the requests, and export their traces."""
    longest_s = 0.0
    for n in ORDER:
        before, began = completed(admin), time.monotonic()
        ask(client, NAMES[n])
        took_s = time.monotonic() - began
        longest_s = max(longest_s, took_s)
        # The scheduler receives the status within 0.1 s; an earlier request may evict the wrong
        # model. The pause is for the replay, where the same start takes longer or shorter: all take
        # the mean, which no start of a busy machine may be far below.
        until(lambda: any(before.get(i, 0) < done for i, done in completed(admin).items()), what=f"request {n} in the report")  # noqa: B023
        time.sleep(PAUSE_S + (longest_s - took_s if took_s > longest_s / 8 else 0.0))

    def is_exported() -> bool:
        count = int(mesh.json("trace", "--export", str(export))["requests"])
        filter_export(export)
        return count >= len(ORDER) and len(export.read_text().splitlines()) >= len(ORDER)

    until(is_exported, what="the traces of all requests")


def collect(mesh: Thaw, export: Path) -> tuple[list[RequestTrace], list[LoadTrace]]:
    """Return the exported requests, and the starts that they waited for, once those are written."""
    found: list[tuple[list[RequestTrace], list[LoadTrace]]] = []

    def are_written() -> bool:
        found[:] = [collect_traces(mesh.url, mesh.endpoints["admin_key"], export)]
        traces, loads = found[0]
        return len(loads) == len({t.load_plan_id for t in traces if t.load_plan_id})

    until(are_written, what="the traces of all starts")
    return found[0]


def test_a_running_mesh_is_replayed(mesh: Thaw, client: openai.OpenAI, admin: httpx.Client, tmp_path: Path) -> None:
    for n in (0, 1, 0):
        ask(client, NAMES[n])
    until(lambda: len(admin.get("/traces").json()["traces"]) >= 3, what="traces of three requests")
    kept = tmp_path / "kept"
    found = simulated(mesh, "--from-mesh", "--mesh", "--policy", POLICY, "--keep", str(kept))
    (run,) = found["runs"]
    assert run["requests"] == found["recorded"]["requests"] >= 3
    assert (run["lost"], run["failed"], run["timed_out"]) == (0, 0, 0)
    assert 0 < found["recorded"]["ttft"]["p50"] <= found["recorded"]["ttft"]["p99"]
    (node,), (seen,) = yaml.safe_load((kept / "cluster.yaml").read_text())["nodes"], admin.get("/cluster").json()["nodes"]
    assert node["device_gb"] * 1e9 == pytest.approx(seen["devices"][0]["budget_bytes"], rel=1e-5)
    assert node["dram_gb"] > 0
    assert {m["name"] for m in yaml.safe_load((kept / "models.yaml").read_text())["models"]} == set(NAMES)
    # The kept files give the same run.
    files = [f"--{option}={kept / name}" for option, name in (("cluster", "cluster.yaml"), ("models", "models.yaml"))]
    assert simulated(mesh, *files, "--trace", str(kept / "run.jsonl"), "--mesh", "--policy", POLICY)["runs"] == [run]
    text = (kept / "models.yaml").read_text()
    (kept / "other.yaml").write_text(text.replace("concurrency", "concurency", 1))
    status, out = mesh.inside("simulate", "--from-mesh", "--models", str(kept / "other.yaml"), "--json", "-")
    assert (status, json.loads(out)["error"]["message"].partition("other.yaml: ")[2]) == (
        1, "models.0.service.batching.concurency: unknown key; did you mean concurrency?",
    )  # fmt: skip
    drawn = simulated(mesh, "--from-mesh", "--workload", "synthetic", "--rps", "0.5", "--duration", "60")
    assert drawn["runs"][0]["requests"] > 5


def simulated(mesh: Thaw, *options: str) -> dict[str, Any]:
    status, out = mesh.inside("simulate", *options, "--json", "-")
    assert status == 0, out
    found: dict[str, Any] = json.loads(out)
    return found


def completed(admin: httpx.Client) -> dict[str, int]:
    """Return the completed requests of idle instances, as the scheduler knows them."""
    instances = [i for node in admin.get("/cluster").json()["nodes"] for i in node["instances"]]
    return {i["instance_id"]: i["load"]["completed"] for i in instances if not i["load"]["active"]}


def ask(client: openai.OpenAI, model: str) -> None:
    stream = client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": "winter"}], max_tokens=4, temperature=0, stream=True
    )
    assert list(stream)
