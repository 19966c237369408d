"""`python -m bench.gpu` on a machine without a GPU."""

from __future__ import annotations

import pytest

import bench.gpu.requirements as requirements
from bench.gpu.__main__ import main
from bench.gpu.plan import STEPS
from bench.gpu.runner import NOTHING_MEASURED
from shared.errors import DeviceMissing

REASON = "No CUDA device can be used here"


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise DeviceMissing(REASON)

    monkeypatch.setattr(requirements, "load_cuda", missing)


def test_plan_lists_all_steps_and_what_is_missing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(requirements, "available_bytes", lambda: 3 * 10**9)
    assert main(["--plan"]) == 0
    shown = capsys.readouterr().out
    for step in STEPS:
        assert f" {step.name} " in shown, step.name
    assert f"missing here: {REASON}" in shown
    assert "missing here: available host memory: 3 GB" in shown


def test_without_a_gpu_nothing_runs_and_the_status_is_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == NOTHING_MEASURED
    assert capsys.readouterr().err == f"nothing measured: {REASON}\n"


@pytest.mark.parametrize(("steps", "reason"), [("tests,none", "no step none"), ("copies", "cannot be rehearsed")])
def test_steps_that_cannot_run_are_refused(steps: str, reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        main(["--rehearse", "--steps", steps])
    assert refused.value.code == 2
    assert reason in capsys.readouterr().err


def test_a_device_has_to_be_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--device", "cpu:0"]) == NOTHING_MEASURED
    assert "cpu:0 is no GPU" in capsys.readouterr().err


def test_missing_parts_of_the_host_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requirements, "available_bytes", lambda: 3 * 10**9)
    monkeypatch.delenv("THAW_VLLM_PYTHON", raising=False)
    missing = "\n".join(requirements.find_missing_on_host(None))
    assert "available host memory: 3 GB, and 64 GB are needed" in missing
    assert "THAW_VLLM_PYTHON" in missing
