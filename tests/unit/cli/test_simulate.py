"""`thaw simulate`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from thaw.cli.app import main

CLUSTER = (
    "{nodes: [{devices: 1, device_gb: 20, dram_gb: 10, ssd_gb: 50, links: {remote: 1, ssd: 5, device: 20}}], "
    "runtime: {startup: {container_s: 1}}}"
)
MODELS = "models: [{name: a, copies: 2, weights_gb: 10, service: {kind: fixed, seconds: 1}, slo_ttft: 5}]"


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    (tmp_path / "cluster.yaml").write_text(CLUSTER)
    (tmp_path / "models.yaml").write_text(MODELS)
    return ["simulate", "--cluster", str(tmp_path / "cluster.yaml"), "--models", str(tmp_path / "models.yaml")]


def test_policies_meet_a_drawn_workload(files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures = tmp_path / "figures.json"
    more = [
        "--policy",
        "thaw,lru",
        "--rps",
        "0.1",
        "--duration",
        "100",
        "--seeds",
        "2",
        "--burst",
        "50:10:3",
        "--json",
        str(figures),
    ]
    assert main([*files, *more]) == 0
    runs = json.loads(figures.read_text())["runs"]
    assert [(r["policy"], r["seed"], r["lost"]) for r in runs] == [("thaw", 0, 0), ("thaw", 1, 0), ("lru", 0, 0), ("lru", 1, 0)]
    assert "2 seeds" in capsys.readouterr().out


def test_a_trace_is_replayed(files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "requests.csv"
    trace.write_text("at,model,prompt_tokens,output_tokens\n0,a-0,1,1\n60,a-0,1,1\n")
    assert main([*files, "--workload", "trace", "--trace", str(trace)]) == 0
    shown = capsys.readouterr().out
    assert "100.0%" in shown  # 2 s until it is ready, and a second
    fared, took = shown.split("from ssd")
    assert "TPOT" in fared
    assert "migrations" in took
    assert "preemptions" in took
    assert main([*files, "--workload", "trace", "--trace", str(trace), "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["runs"][0]["requests"] == 2


def test_invalid_options_and_files_are_refused(files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*files, "--workload", "trace"]) != 0
    assert "go together" in capsys.readouterr().err
    assert main([*files, "--burst", "5:5"]) != 0
    assert "AT:SECONDS:TIMES" in capsys.readouterr().err
    assert main([*files, "--policy", "best"]) != 0
    assert "serverlessllm" in capsys.readouterr().err
    assert main([*files, "--rps", "-1"]) == 1
    assert "--rps must be positive" in capsys.readouterr().err
    trace = tmp_path / "requests.csv"
    for text, expected in (
        ("when,what\n1,2\n", "has no columns at, model"),
        ("at,model,prompt_tokens,output_tokens\n", "holds no request"),
    ):
        trace.write_text(text)
        assert main([*files, "--workload", "trace", "--trace", str(trace)]) == 1
        assert expected in capsys.readouterr().err
    (tmp_path / "models.yaml").write_text(MODELS.replace("weights_gb: 10", "weights_gb: 50"))
    assert main(files) == 1
    assert "a needs 50 GB" in capsys.readouterr().err
    (tmp_path / "cluster.yaml").write_text("nodes: none")
    assert main(files) != 0
    assert "cluster.yaml: nodes" in capsys.readouterr().err


def test_a_document_larger_than_a_pipe_is_read(files: list[str], tmp_path: Path) -> None:
    """The simulator waits until its output is read; its messages end only after that."""
    figures = tmp_path / "figures.json"
    arguments = [*files, "--rps", "0.1", "--duration", "10", "--seeds", "100", "--json", str(figures)]
    process = subprocess.run([sys.executable, "-m", "thaw", *arguments], capture_output=True, timeout=60, check=False)
    assert process.returncode == 0
    assert len(json.loads(figures.read_text())["runs"]) == 100
    assert len(json.dumps(json.loads(figures.read_text()))) > 65_536
