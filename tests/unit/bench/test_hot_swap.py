"""Evaluation of bench.hot_swap's figures.

tests/integration/suspend tests the engines themselves.
"""

from __future__ import annotations

import sys

import pytest

from bench import hot_swap
from bench.hot_swap import DEVICE, MIB, NO_DEVICE, PINNED, SIZE, Figures, summary
from shared.errors import DeviceMissing


def test_ratios_are_of_medians() -> None:
    figures = Figures()
    for what, values in {
        "cold_ttft_ms": (24_000, 26_000),
        "resume_later_ttft_ms": (90, 100, 500),
        "decode_before_tokens_per_s": (300, 310),
        "decode_after_tokens_per_s": (305, 305),
    }.items():
        for value in values:
            figures.add("vllm", what, value)
    found = summary(figures)
    assert found["vllm.resume_speedup_over_cold"] == 250
    assert found["vllm.decode_after_over_before"] == 1
    assert "vllm.restored_over_pinned_copy" not in found, "there was no GPU"


def test_a_first_suspension_is_set_against_the_disks_best() -> None:
    figures = Figures()
    figures.add(SIZE, "2_gib_suspend_first_ms", 2000.0)
    for jobs, speed in ((1, 1024.0), (2, 2048.0), (4, 1500.0)):
        figures.add(SIZE, f"disk_{jobs}_writers_mib_per_s", speed)
    found = summary(figures)
    assert found["size.2_gib_first_over_disk"] == pytest.approx(0.5)
    assert "size.3_gib_first_over_disk" not in found


def test_gpu_restore_speed_is_compared_with_pinned_copies() -> None:
    figures = Figures()
    figures.add(DEVICE, PINNED, 50.0)
    figures.add("vllm", "freed_mib", 40e9 / MIB)
    figures.add("vllm", "resume_later_ms", 1000.0)
    found = summary(figures)
    assert found["vllm.restored_gb_per_s"] == pytest.approx(40)
    assert found["vllm.restored_over_pinned_copy"] == pytest.approx(0.8)


def test_missing_requested_gpu_ends_the_benchmark(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def missing(index: int) -> float:
        raise DeviceMissing(f"there is no GPU {index}")

    monkeypatch.setattr(hot_swap, "pinned_copies", missing)
    monkeypatch.setattr(sys, "argv", ["hot_swap", "--device", "cuda:1"])
    assert hot_swap.main() == NO_DEVICE
    assert "there is no GPU 1" in capsys.readouterr().err
