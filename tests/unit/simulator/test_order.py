"""Input and output of `thaw simulate`: runs by policy and seed, plots, and errors."""

from __future__ import annotations

import importlib.util
import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from shared.errors import InvalidRequest
from simulator.__main__ import main
from simulator.config import ClusterFile, ModelsFile, read
from simulator.plots import interval
from simulator.report import TIERS

CLUSTER = (
    "{nodes: [{devices: 2, device_gb: 20, dram_gb: 10, ssd_gb: 50, links: {remote: 1, ssd: 5, device: 20}}], "
    "runtime: {startup: {container_s: 1}}}"
)
MODELS = "models: [{name: a, copies: 2, weights_gb: 10, service: {kind: fixed, seconds: 1}, slo_ttft: 5}]"
FIGURES = {
    "requests", "ttft", "tpot", "slo_attainment", "loads", "startup", "pause", "functions_compliant", "device_load_variance",
    "migrations", "preemptions", "device_seconds", "device_memory_seconds",
}  # fmt: skip


@pytest.fixture
def order(tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "cluster.yaml").write_text(CLUSTER)
    (tmp_path / "models.yaml").write_text(MODELS)
    return {"cluster": str(tmp_path / "cluster.yaml"), "models": str(tmp_path / "models.yaml"), "rps": 0.2, "duration": 200}


def sent(order: dict[str, Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> tuple[int, dict[str, Any]]:
    monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps(order)))
    status = main()
    return status, json.loads(capsys.readouterr().out)


def test_runs_by_policy_and_seed(
    order: dict[str, Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    status, document = sent({**order, "policies": ["thaw", "lru"], "seeds": 2}, capsys, monkeypatch)
    assert status == 0
    runs = document["runs"]
    assert [(r["policy"], r["seed"], r["lost"]) for r in runs] == [("thaw", 0, 0), ("thaw", 1, 0), ("lru", 0, 0), ("lru", 1, 0)]
    assert runs[0]["ttft"] != runs[1]["ttft"]
    assert runs[0]["requests"] == runs[2]["requests"]  # all policies have the same requests
    assert set(runs[0]) >= FIGURES
    assert set(runs[0]["ttft"]) >= {"p50", "p95", "p99"}
    assert set(runs[0]["loads"]) == set(TIERS)
    assert (status, document) == sent({**order, "policies": ["thaw", "lru"], "seeds": 2}, capsys, monkeypatch)


def test_mesh_simulation_runs_the_whole_scheduler(
    order: dict[str, Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    status, document = sent({**order, "mesh": True}, capsys, monkeypatch)
    assert status == 0
    assert document["runs"][0]["lost"] == 0
    assert document["runs"][0]["requests"] > 10


def test_plots_are_written(
    order: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    status, document = sent({**order, "seeds": 2, "plots": str(tmp_path / "plots")}, capsys, monkeypatch)
    assert status == 0
    assert len(document["plots"]) == 6  # no response had a second token
    assert all(Path(p).read_bytes().startswith(b"\x89PNG") for p in document["plots"])


def test_missing_matplotlib_error_names_the_package_to_install(
    order: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    status, document = sent({**order, "plots": str(tmp_path / "plots")}, capsys, monkeypatch)
    assert status == 1
    assert "pip install 'thaw-mesh[plots]'" in document["error"]["message"]


def test_an_interval_over_seeds() -> None:
    assert interval([2.0]) == (2.0, 0.0)
    middle, half = interval([1.0, 2.0, 3.0])
    assert middle == 2.0
    assert half == pytest.approx(4.30 / 3**0.5)


@pytest.mark.parametrize(
    ("file", "text", "expected"),
    [
        ("cluster.yaml", CLUSTER.replace("devices: 2", "devices: 0"), "cluster.yaml: nodes.0.devices"),
        ("cluster.yaml", CLUSTER.replace("container_s", "kontainer_s"), "cluster.yaml: runtime.startup.kontainer_s"),
        ("models.yaml", MODELS.replace("fixed", "magic"), "models.yaml: models.0.service"),
        ("models.yaml", MODELS + "\nmore: 1", "models.yaml: more"),
        (
            "models.yaml",
            MODELS.replace("weights_gb: 10", "weights_gb: 30, kv_gb: 1"),
            "models.yaml: models.0: a needs 31 GB (weights_gb + kv_gb); the largest device that it may be on has 20 GB",
        ),
        ("models.yaml", MODELS.replace("copies: 2", "kinds: [h100]"), "a may only be on devices of kind h100"),
        ("models.yaml", "models: [", "models.yaml cannot be read"),
        ("models.yaml", "- a", "models.yaml: the file: must be a mapping of keys to values"),
    ],
)
def test_invalid_input_file_is_refused(
    order: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, file: str, text: str, expected: str
) -> None:  # fmt: skip
    (tmp_path / file).write_text(text)
    status, document = sent(order, capsys, monkeypatch)
    assert status == 1
    assert expected in document["error"]["message"]


@pytest.mark.parametrize(
    ("right", "wrong", "fault"),
    [
        ("device_gb", "device_gbs", "nodes.0.device_gbs: unknown key; did you mean device_gb?"),
        ("ssd: 5", "sdd: 5", "nodes.0.links.sdd: unknown key; did you mean ssd?"),
        ("container_s", "contaner_s", "runtime.startup.contaner_s: unknown key; did you mean container_s?"),
        ("nodes", "node", "node: unknown key; did you mean nodes?"),
        (
            "remote: 1",
            "xyz: 1",
            "nodes.0.links.xyz: unknown key; allowed are bus, bus_devices, device, peer, remote, sequential, ssd",
        ),
        ("devices: 2, ", "", "nodes.0.devices: this key is required"),
    ],
)
def test_mistyped_key_error_suggests_the_right_key(tmp_path: Path, right: str, wrong: str, fault: str) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(CLUSTER.replace(right, wrong, 1))
    with pytest.raises(InvalidRequest) as refused:
        read(path, ClusterFile)
    assert refused.value.message.startswith(f"{path}: {fault}")
    assert "at least 1 item" not in refused.value.message
    if "did you mean" in fault:
        assert refused.value.message == f"{path}: {fault}"  # not a missing key in addition


def test_mistyped_key_within_a_union_is_named(tmp_path: Path) -> None:
    path = tmp_path / "models.yaml"
    path.write_text(MODELS.replace("seconds", "secnds"))
    with pytest.raises(InvalidRequest, match=r"models\.0\.service\.fixed\.secnds: unknown key; did you mean seconds\?$"):
        read(path, ModelsFile)


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({"rps": 0}, "--rps must be positive"),
        ({"rps": -1}, "--rps must be positive"),
        ({"duration": -5}, "--duration must be positive"),
        ({"output_tokens": -1}, "--output-tokens must be positive"),
        ({"policies": []}, "policies"),
        ({"policies": ["best"]}, "no scheduling policy 'best'; there are "),
        ({"locality": "L9"}, "L1, L2, L3, L4"),
        ({"lengths": "novels"}, "sharegpt"),
        ({"seeds": 0}, "seeds"),
    ],
)
def test_invalid_simulation_options_are_refused(
    order: dict[str, Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, more: dict[str, Any], expected: str
) -> None:
    status, document = sent({**order, **more}, capsys, monkeypatch)
    assert status == 1
    assert expected in document["error"]["message"]
