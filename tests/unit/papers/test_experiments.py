"""Every experiment runs end to end, in the smallest form that still has requests."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from bench.papers.__main__ import EXPERIMENTS, constants
from bench.papers.core import Options, format_result

ROOT = Path(__file__).parents[3]
LARGE = {"torpor_fig10": 16, "torpor_fig16": 16, "thaw_beside": 16}
SCALE = {"torpor_fig10": 0.015, "torpor_fig11": 0.02, "torpor_fig14": 0.02, "torpor_fig16": 0.02}


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_experiment_prints_the_papers_figures_beside_the_measured_ones(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = import_module(f"bench.papers.{name}")
    if name in ("torpor_fig10", "torpor_fig16", "thaw_beside"):
        monkeypatch.setattr(module, "FUNCTIONS", LARGE[name])
    if name in ("torpor_fig11", "torpor_fig14"):
        few(module, monkeypatch)
    if name == "hydraserve_fig9":
        monkeypatch.setattr("bench.papers.constants.hydraserve.CVS", (2,))
        monkeypatch.setattr("bench.papers.constants.hydraserve.RATES", (0.6,))
    result = module.run(Options(seeds=1, scale=SCALE.get(name, 0.03), sensitivity=False))
    assert result.name == module.NAME == name.replace("_", "-")
    assert result.rows
    assert result.claims
    text = format_result(result)
    assert "| where | the paper says |" in text
    assert "(paper " in text or "plot only" in text
    json.dumps(result.document(), default=str)


def few(module: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """Return eight functions under the labels of hundreds."""
    from bench.papers import torpor

    whole = torpor.functions
    monkeypatch.setattr(torpor, "functions", lambda count, *rest, **more: whole(8, *rest, **more))


def test_constants_name_their_sources() -> None:
    lines = constants().splitlines()[2:]
    assert len(lines) > 40
    assert all(line.rsplit("|", 2)[1].strip() for line in lines)
    assert any("| no |" in line for line in lines)


def test_a_mistyped_experiment_is_refused_with_the_names() -> None:
    done = subprocess.run([sys.executable, "-m", "bench.papers", "fig99"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "serverlessllm-fig8" in done.stderr
