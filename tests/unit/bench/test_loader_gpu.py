"""The GPU benchmark: its arithmetic and clean-up on a stand-in driver, and its refusal where there is no GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import loader_gpu
from bench.loader_gpu import CHUNK, NO_DEVICE, Bench, disk_file, figures_of, main
from services.loader.devices.port import DeviceFailed
from shared.errors import DeviceMissing
from tests.unit.loader.devices.fake_driver import FakeDriver


def test_no_gpu_is_one_line_and_status_2(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def missing() -> None:
        raise DeviceMissing("no CUDA device can be used here")

    monkeypatch.setattr(loader_gpu, "load_cuda", missing)
    assert main([]) == NO_DEVICE
    assert capsys.readouterr().err == "nothing measured: no CUDA device can be used here\n"


def test_every_figure_and_nothing_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader_gpu, "run_fio", lambda files, block, depth: (1e9, 0.1))
    driver = FakeDriver(2)
    bench = Bench(driver, [driver.facts(n) for n in (0, 1)], CHUNK + 4096, 1024 * 1024)
    with disk_file(tmp_path, bench) as file:
        figures = figures_of(bench, 1, file)
    bench.close()
    assert {"dram_ratio", "ssd_ratio", "devices_ratio", "small_grouped_gb_per_s"} <= figures.keys()
    assert all(value > 0 for value in figures.values())
    assert (driver.memory, driver.pinned, driver.streams, driver.events) == ({}, {}, [], 0)
    assert driver.unpinned_copies == 0
    assert list(tmp_path.iterdir()) == []


def test_bytes_that_did_not_arrive_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = FakeDriver()
    bench = Bench(driver, [driver.facts(0)], CHUNK, 1024 * 1024)
    real = driver.copy
    monkeypatch.setattr(driver, "copy", lambda to, source, nbytes, stream: real(to, source + 16, nbytes - 16, stream))
    with pytest.raises(DeviceFailed, match="does not hold"):
        bench.loaded(bench.devices)
    bench.close()
