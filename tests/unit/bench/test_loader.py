"""The loader's benchmark: its checkpoint is one, every loader that is installed reads the same bytes, and its ratios are what they say."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from bench.loader import REMOTE_WAYS, Case, Samples, figures_of, remote_figures, run_case, set_cache, write_checkpoint
from bench.loader_service import dram
from services.loader.format.checkpoint import open_checkpoint


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    # No layers: embedding and head alone.
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"), 0)


def test_the_checkpoint_is_whole(files: list[Path]) -> None:
    found = open_checkpoint(files[0].parent)
    assert [t.name for f in found.files for t in f.header.tensors] == ["model.embed_tokens.weight", "lm_head.weight"]


def test_every_loader_reads_the_same_bytes(files: list[Path]) -> None:
    run_case(Case("torch.save", "save_as_torch"), files, sys.executable)
    checksums = set()
    for loader in ("thaw_pool", "thaw_tensors", "whole_files", "safetensors", "torch_load", "torch_load_mmap"):
        set_cache(files, warm=loader == "thaw_tensors")
        got = run_case(Case(loader, loader), files, sys.executable)
        checksums.add(got["checksum"])
        assert got["seconds"] > 0
        assert got["peak_bytes"] > 0.9 * sum(f.stat().st_size for f in files)
    assert len(checksums) == 1


def test_a_loader_process_is_measured_over_its_socket(files: list[Path]) -> None:
    found = dram(files, 1)
    assert 0 < found["dram_tier.bound_ms"] <= found["dram_tier.worst_bound_ms"]
    figures = remote_figures(files, 1)
    assert figures["remote.thaw_first_tensor_s"] > 0
    assert all(figures[f"remote.{way}_gb_per_s"] > 0 for way in REMOTE_WAYS)


def test_ratios_compare_medians_of_one_state_of_the_cache() -> None:
    samples = {
        "thaw": Samples([1.0, 3.0, 2.0], [1.0], [1e9]),
        "thaw, page cache": Samples([6.0], [1.0], [1e9]),
        "safetensors": Samples([0.5], [1.0], [1e9]),
        "safetensors, page cache": Samples([2.0], [1.0], [1e9]),
        "fio": Samples([2.0], [0.1]),
    }
    figures = figures_of(samples)
    assert figures["thaw_over_safetensors.cold"] == 4.0
    assert figures["thaw_over_safetensors.page_cache"] == 3.0
    assert figures["thaw_over_fio.cold"] == 1.0
    assert "thaw_over_fio.page_cache" not in figures
    assert "fio.peak_gb" not in figures
