"""A step of `python -m bench.gpu` that serves a model, rehearsed on a cpu device."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow


def test_first_token_is_rehearsed_without_a_gpu(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bench.gpu", "--rehearse", "--steps", "first_token", "--work", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=170, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "rehearsed" / "gpu_first_token.json").read_text())
    figures: dict[str, float] = found["figures"]
    assert figures["dram_ttft_ms"] > 0
    assert figures["disk_ttft_ms"] > 0
    assert figures["ttft_over_copy"] == pytest.approx(figures["dram_ttft_ms"] / figures["copy_ms"], rel=0.01)
    assert found["commands"][0].startswith("python -m bench.gpu.serving first_token ")
    assert "TTFT" in (tmp_path / "first_token.txt").read_text()
