"""The simulator's process: one node less, limits, and its end with the process that started it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shared.errors import InvalidRequest
from simulator.config import ClusterFile
from simulator.order import leave_out
from tests.support import forking

NODE = {"devices": 1, "device_gb": 20, "dram_gb": 10, "ssd_gb": 50, "links": {"remote": 1, "ssd": 5, "device": 20}}
MODELS = "models: [{name: a, copies: 2, weights_gb: 10, service: {kind: fixed, seconds: 1}, slo_ttft: 5}]"
LIMITS = {"cpu_s": 60, "memory_bytes": 2 * 1024**3}
_COMMAND = (sys.executable, "-m", "simulator")


def cluster(*nodes: dict[str, Any]) -> ClusterFile:
    return ClusterFile.model_validate({"nodes": [NODE | node for node in nodes]})


def names(found: ClusterFile) -> list[str]:
    return [name for name, _ in found.iter_nodes()]


def test_a_node_is_left_out_by_its_name_or_its_number() -> None:
    whole = cluster({"name": "big", "count": 3}, {"name": "small"})
    assert names(leave_out(whole, "small")) == names(leave_out(whole, "small-0")) == ["big-0", "big-1", "big-2"]
    assert names(leave_out(whole, "big-1")) == ["big-0", "big-1", "small-0"]
    with pytest.raises(InvalidRequest, match="big-0, big-1, big-2, small-0"):
        leave_out(whole, "big")
    with pytest.raises(InvalidRequest, match="only node"):
        leave_out(cluster({"name": "small"}), "small")


def test_failures_follow_their_nodes_if_one_is_left_out() -> None:
    failures = {
        "events": [{"node": f"big-{n}", "at": n, "seconds": 1} for n in range(3)] + [{"node": "small-0", "at": 9, "seconds": 1}]
    }
    nodes = [NODE | {"name": "big", "count": 3}, NODE | {"name": "small"}]
    whole = ClusterFile.model_validate({"nodes": nodes, "failures": failures})

    def list_planned(found: ClusterFile) -> list[tuple[str, float]]:
        return [(e.node, e.at) for e in found.failures.events]

    assert list_planned(leave_out(whole, "big-1")) == [("big-0", 0), ("big-1", 2), ("small-0", 9)]
    assert list_planned(leave_out(whole, "small")) == [("big-0", 0), ("big-1", 1), ("big-2", 2)]


def order(directory: Path, **fields: Any) -> str:
    document = {"nodes": [NODE | {"name": name} for name in ("x", "y")]}
    (directory / "cluster.yaml").write_text(json.dumps(document))
    (directory / "models.yaml").write_text(MODELS)
    return json.dumps({"cluster": f"{directory}/cluster.yaml", "models": f"{directory}/models.yaml"} | fields) + "\n"


def test_each_policy_is_simulated_again_without_the_node(tmp_path: Path) -> None:
    text = order(tmp_path, policies=["thaw", "lru"], without="y", rps=0.2, duration=60, limits=LIMITS)
    with subprocess.Popen(_COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        assert child.stderr is not None
        child.stdin.write(text)
        child.stdin.flush()
        progress = [json.loads(line) for line in child.stderr]
        runs = json.loads(child.stdout.read())["runs"]
    assert child.returncode == 0
    assert [(r["policy"], r["without"]) for r in runs] == [("thaw", None), ("lru", None), ("thaw", "y"), ("lru", "y")]
    assert len({r["requests"] for r in runs}) == 1
    assert [p["done"] for p in progress] == [0, 1, 2, 3, 4]
    # The runs without the node are those of a cluster that never had it.
    alone = json.loads(order(tmp_path, policies=["thaw", "lru"], rps=0.2, duration=60))
    (tmp_path / "cluster.yaml").write_text(json.dumps({"nodes": [NODE | {"name": "x"}]}))
    done = subprocess.run(_COMMAND, input=json.dumps(alone) + "\n", capture_output=True, text=True, check=True)
    assert [r | {"without": "y"} for r in json.loads(done.stdout)["runs"]] == runs[2:]


def endless(directory: Path, **limits: int) -> str:
    return order(directory, rps=50, duration=1e6, limits=LIMITS | limits)


def test_the_process_ends_with_its_input(tmp_path: Path) -> None:
    with subprocess.Popen(
        _COMMAND, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, text=True
    ) as child:
        assert child.stdin is not None
        child.stdin.write(endless(tmp_path))
        child.stdin.close()  # as the kernel does when the gateway is killed
        assert child.wait(60) == 1


@pytest.mark.parametrize(("limits", "ended"), [({"memory_bytes": 128 * 1024**2}, "memory"), ({"cpu_s": 3}, "time")])
def test_the_process_keeps_its_limits(tmp_path: Path, limits: dict[str, int], ended: str) -> None:
    # A forked process has the tests' modules, too, and less memory left for the simulation.
    with (
        forking.executed(),
        subprocess.Popen(_COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as child,
    ):
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.write(endless(tmp_path, **limits))
        child.stdin.flush()
        text = child.stdout.read()
        status = child.wait(60)
    if ended == "memory":
        assert (status, json.loads(text)["error"]["code"]) == (1, "insufficient_memory")
    else:
        assert (status < 0, text) == (True, "")
