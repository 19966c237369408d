"""The benchmark of a KV cache in a GPU's pages, on the stand-in GPU: times mean nothing here."""

from __future__ import annotations

import pytest
import torch

from bench.gpu import kv_pages
from bench.gpu.kv_pages import Shape, measure
from bench.gpu.runner import NOTHING_MEASURED
from shared.errors import DeviceMissing
from tests.support.stand_in_gpu import StandInGpu

SHAPE = Shape(layers=3, heads=4, kv_heads=2, width=16, tokens=300, dtype=torch.float32)


def test_every_figure_is_measured_and_all_memory_is_given_back() -> None:
    gpu = StandInGpu(4)
    figures = measure(gpu, SHAPE, 3, lambda: gpu.memory.free_bytes(0))
    assert (figures["pages"], figures["freed_part"]) == (3, 1)
    assert all(figures[f"{what}_ms"] > 0 for what in ("allocate", "map", "move", "release", "attention", "contiguous"))
    assert figures["attention_ratio"] == figures["attention_ms"] / figures["contiguous_ms"]
    assert (gpu.memory.handles, gpu.memory.mappings, gpu.memory.reservations) == ({}, {}, {})


def test_without_a_gpu_nothing_is_measured(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def load() -> None:
        raise DeviceMissing("no driver")

    monkeypatch.setattr(kv_pages, "load_cuda", load)
    assert kv_pages.main([]) == NOTHING_MEASURED
    assert "nothing measured: no driver" in capsys.readouterr().out
