"""Parts of bench.gpu's steps: models, counts of tests, and the order of requests."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from bench.gpu.models import TEN, TINY, fine_tune
from bench.gpu.serving import arrivals, phases_of, read_settled
from bench.gpu.suite import count
from thaw.demo.models import make_demo_model


def test_a_fine_tune_differs_in_its_last_layers(tmp_path: Path) -> None:
    base = make_demo_model(tmp_path / "base", replace(TINY, vocab=1024, hidden=64, intermediate=160, heads=2, kv_heads=1))
    part = fine_tune(base, tmp_path / "tuned")
    assert 0.2 <= part < 0.3
    before, after = (load_file(d / "model.safetensors") for d in (base, tmp_path / "tuned"))
    changed = {n for n, tensor in before.items() if not (tensor == after[n]).all()}
    nbytes = {n: tensor.nbytes for n, tensor in before.items()}
    assert sum(nbytes[n] for n in changed) / sum(nbytes.values()) == pytest.approx(part, abs=0.01), "norms are all ones"
    assert all(n.startswith(("model.layers.5.", "model.layers.6.", "model.layers.7.")) for n in changed)
    for name in changed:
        assert torch.equal(before[name].flatten().sort().values, after[name].flatten().sort().values)


def test_results_of_a_test_run_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "r.xml"
    path.write_text('<testsuites><testsuite tests="7" failures="1" errors="1" skipped="2" time="3.5"/></testsuites>')
    assert count(path) == {"passed": 3.0, "failed": 2.0, "skipped": 2.0, "seconds": 3.5}


def test_every_model_is_asked_for_and_popular_ones_more_often() -> None:
    found = arrivals(500, 5.0, TEN)
    times, asked = [at for at, _ in found], Counter(model for _, model in found)
    assert times == sorted(times)
    assert 80 < times[-1] < 125, "500 requests at 5 per second"
    assert set(asked) == set(TEN)
    assert asked[TEN[0]] > 3 * asked[TEN[9]]
    assert arrivals(500, 5.0, TEN) == found, "the same seed gives the same requests"


def test_phases_of_a_trace_are_added_by_name() -> None:
    path = [("load", 3.0), ("mesh", 1.0), ("load", 2.0)]
    trace = {"request": {"critical_path": [{"phase": p, "start_ms": 0, "duration_ms": ms} for p, ms in path]}}
    assert phases_of(trace) == {"last_load_ms": 5.0, "last_mesh_ms": 1.0}


def test_a_reading_counts_when_it_does_not_change(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.gpu.serving._SETTLED_S", 0.0)
    readings = iter([1, 2, 5, 5, 9])
    assert read_settled(lambda: next(readings)) == 5


def test_a_reading_that_always_changes_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.gpu.serving._SETTLED_S", 0.0)
    monkeypatch.setattr("bench.gpu.serving._SETTLE_WITHIN_S", 0.05)
    readings = iter(range(10**9))
    with pytest.raises(RuntimeError, match="other programs use it"):
        read_settled(lambda: next(readings))
