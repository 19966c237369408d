"""The loader's benchmark.

Its checkpoint is valid, every installed loader reads the same bytes, and its ratios are correct.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import disk
from bench.disk import Loading, set_cache, write_checkpoint
from bench.loader import REMOTE_WAYS, figures_of
from bench.loader_service import dram, remote
from bench.samples import Samples
from weights.formats.checkpoint import open_checkpoint


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    # No layers: only embedding and head, of a chunk of a pool each.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(disk, "_VOCAB", 4_096)
        return write_checkpoint(tmp_path_factory.mktemp("checkpoint"), 0)


def test_checkpoint_of_the_benchmark_is_valid(files: list[Path]) -> None:
    found = open_checkpoint(files[0].parent)
    assert [t.name for f in found.files for t in f.header.tensors] == ["model.embed_tokens.weight", "lm_head.weight"]


def test_every_loader_reads_the_same_bytes(files: list[Path]) -> None:
    with Loading("save_as_torch", files, {}) as saving:
        saving.go()
    checksums = set()
    for loader in ("thaw_pool", "thaw_tensors", "whole_files", "safetensors", "torch_load", "torch_load_mmap"):
        suffix = ".bin" if loader.startswith("torch") else ".safetensors"
        with Loading(loader, [f.with_suffix(suffix) for f in files], {}) as loading:
            set_cache(files, warm=loader == "thaw_tensors")
            got = loading.go()
        checksums.add(got["checksum"])
        assert got["seconds"] > 0
        assert got["peak_bytes"] > 0.9 * sum(f.stat().st_size for f in files)
    assert len(checksums) == 1


def test_failed_loader_reports_its_error(files: list[Path]) -> None:
    with (
        Loading("safetensors", [files[0].with_name("none.safetensors")], {}) as loading,
        pytest.raises(RuntimeError, match="No such file"),
    ):
        loading.go()


def test_loader_process_is_measured_over_its_socket(files: list[Path], tmp_path: Path) -> None:
    samples, total = Samples(tmp_path / "samples.json"), sum(f.stat().st_size for f in files)
    for name, values in (dram(files, 1) | remote(files, 1)).items():
        samples.add(name, *values)
    figures = figures_of(Samples(tmp_path / "samples.json"), total)
    assert 0 < figures["dram_tier.bound_ms"] <= figures["dram_tier.worst_bound_ms"]
    assert figures["remote.thaw_first_tensor_s"] > 0
    assert all(figures[f"remote.{way}_gb_per_s"] > 0 for way in REMOTE_WAYS)


def test_ratios_compare_medians_of_one_cache_state() -> None:
    samples = Samples()
    speeds = {
        "thaw": (1.0, 3.0, 2.0),
        "thaw, page cache": (6.0,),
        "safetensors": (0.5,),
        "safetensors, page cache": (2.0,),
        "fio, 4 MB reads, 8 at once": (2.0,),
        "fio, 16 MB reads, 4 at once": (1.0,),
    }
    for name, values in speeds.items():
        samples.add(f"{name}.gb_per_s", *values)
        samples.add(f"{name}.cpu_seconds", 1.0)
    samples.add("pairs, thaw first.ratio", 1.0, 2.0, 9.0)
    samples.add("pairs, fio first.ratio", 0.5)
    figures = figures_of(samples, 4_000_000_000)
    assert figures["thaw_over_safetensors.cold"] == 4.0
    assert figures["thaw_over_safetensors.page_cache"] == 3.0
    assert (figures["fio.gb_per_s"], figures["thaw_over_fio.cold"]) == (2.0, 1.0)
    assert figures["thaw_over_fio.by_turns"] == 1.0
    assert figures["thaw.cores"] == 0.5
    assert "thaw_over_fio.page_cache" not in figures
