"""Workloads, files and the command that `thaw simulate` runs."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from statistics import mean, pstdev

import pytest

from services.scheduler.simulation.__main__ import main
from services.scheduler.simulation.workloads.synthetic import Synthetic, read_trace, synthetic
from shared.errors import InvalidRequest

CLUSTER = (
    "{nodes: [{devices: 1, device_gb: 20, dram_gb: 10, ssd_gb: 50, links: {remote: 1, ssd: 5, device: 20}}], "
    "runtime: {startup: {container_s: 1}}}"
)
MODELS = "models: [{name: a, copies: 2, weights_gb: 10, service: {kind: fixed, seconds: 1}, slo_ttft: 5}]"


@pytest.mark.parametrize("cv", [0.5, 1.0, 4.0])
def test_arrivals_have_their_rate_and_coefficient_of_variation(cv: float) -> None:
    requests = synthetic(Synthetic(10, 20_000, cv, length_cv=0.5), ["a"], 3)
    gaps = [b.at - a.at for a, b in pairwise(requests)]
    assert mean(gaps) == pytest.approx(0.1, rel=0.05)
    assert pstdev(gaps) / mean(gaps) == pytest.approx(cv, rel=0.1)
    lengths = [r.prompt_tokens for r in requests]
    assert mean(lengths) == pytest.approx(256, rel=0.02)
    assert pstdev(lengths) / mean(lengths) == pytest.approx(0.5, rel=0.05)


def test_popularity_follows_zipf_and_the_seed_decides_everything() -> None:
    models = ["a", "b", "c", "d"]
    requests = synthetic(Synthetic(50, 2000, zipf=1.0), models, 1)
    counts = [sum(r.model == m for r in requests) for m in models]
    assert [c / counts[0] for c in counts] == pytest.approx([1, 1 / 2, 1 / 3, 1 / 4], rel=0.05)
    assert synthetic(Synthetic(5, 100), models, 1) == synthetic(Synthetic(5, 100), models, 1)
    assert synthetic(Synthetic(5, 100), models, 1) != synthetic(Synthetic(5, 100), models, 2)


def test_a_trace_is_read_and_its_faults_are_named(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("at,model,prompt_tokens,output_tokens\n2.5,a,10,20\n1,b,1,2\n")
    assert [(r.at, r.model, r.output_tokens) for r in read_trace(path, ["a", "b"])] == [(1.0, "b", 2), (2.5, "a", 20)]
    with pytest.raises(InvalidRequest, match="line 3: no model 'b'"):
        read_trace(path, ["a"])
    path.write_text("at,model\n1,a\n")
    with pytest.raises(InvalidRequest, match="lacks the columns prompt_tokens, output_tokens"):
        read_trace(path, ["a"])
    path.write_text("at,model,prompt_tokens,output_tokens\nsoon,a,1,2\n")
    with pytest.raises(InvalidRequest, match="line 2"):
        read_trace(path, ["a"])
    with pytest.raises(InvalidRequest, match="cannot be read"):
        read_trace(tmp_path / "none.csv", ["a"])


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    (tmp_path / "cluster.yaml").write_text(CLUSTER)
    (tmp_path / "models.yaml").write_text(MODELS)
    return ["--cluster", str(tmp_path / "cluster.yaml"), "--models", str(tmp_path / "models.yaml")]


def test_runs_by_seed(files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*files, "--rps", "0.2", "--duration", "200", "--seeds", "2"]) == 0
    runs = json.loads(capsys.readouterr().out)["runs"]
    assert [(r["policy"], r["seed"], r["lost"]) for r in runs] == [("thaw", 0, 0), ("thaw", 1, 0)]
    assert runs[0]["ttft"] != runs[1]["ttft"]
    assert runs[0]["loads"]["ssd"] + runs[0]["loads"]["dram"] >= 2


@pytest.mark.parametrize(
    ("file", "text", "told"),
    [
        ("cluster.yaml", CLUSTER.replace("devices: 1", "devices: 0"), "cluster.yaml: nodes.0.devices"),
        ("models.yaml", MODELS.replace("fixed", "magic"), "models.yaml: models.0.service"),
        ("models.yaml", MODELS + "\nmore: 1", "models.yaml: more"),
        ("models.yaml", "models: [", "models.yaml cannot be read"),
    ],
)
def test_a_file_that_cannot_be_meant(
    files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], file: str, text: str, told: str
) -> None:
    (tmp_path / file).write_text(text)
    assert main(files) == 1
    assert told in json.loads(capsys.readouterr().out)["error"]["message"]


def test_numbers_that_cannot_be_meant(files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*files, "--rps", "0"]) == 1
    assert "requests-per-second must be positive" in capsys.readouterr().out
