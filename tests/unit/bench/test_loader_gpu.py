"""The GPU benchmark: arithmetic and clean-up on a stand-in driver.

Without a GPU it refuses to run.
"""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from bench import loader_gpu
from bench.loader_gpu import CHUNK, NO_DEVICE, Bench, disk_file, figures_of, main
from shared.errors import DeviceFailed, DeviceMissing
from tests.unit.loader.devices.fake_driver import FakeDriver
from weights.devices.curve import Point


def test_missing_gpu_prints_one_line_and_returns_2(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def missing() -> None:
        raise DeviceMissing("No CUDA device can be used here")

    monkeypatch.setattr(loader_gpu, "load_cuda", missing)
    assert main([]) == NO_DEVICE
    assert capsys.readouterr().err == "nothing measured: No CUDA device can be used here\n"


def test_benchmark_returns_every_figure_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


@pytest.mark.parametrize("group", [3 * 1024 * 1024, 2 * CHUNK])
def test_no_copy_reaches_over_two_registrations(group: int) -> None:
    """No copy spans two registrations, which CUDA refuses.

    The host's memory is registered chunk by chunk, and the elbow of a bus may exceed a chunk.
    """
    driver = FakeDriver()
    bench = Bench(driver, [driver.facts(0)], 3 * CHUNK, group)
    driver.gate.clear()  # ranges queue behind the first copies, and are joined
    threading.Timer(0.2, driver.gate.set).start()
    assert bench.measure_loaded(bench.devices, CHUNK // 4) > 0
    bench.close()
    assert (driver.memory, driver.pinned, driver.unpinned_copies) == ({}, {}, 0)


def test_without_fio_or_direct_io_the_rest_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader_gpu, "load_cuda", FakeDriver)
    monkeypatch.setattr(loader_gpu, "measure", lambda driver, facts: [Point(1024 * 1024, 1e9)])
    monkeypatch.setenv("PATH", str(tmp_path))
    report = tmp_path / "report.json"
    assert main(["--bytes", "16MiB", "--rounds", "1", "--json", str(report)]) == 0
    figures = json.loads(report.read_text())
    assert "dram_ratio" in str(figures)
    assert "ssd_ratio" not in str(figures)


def test_missing_bytes_on_the_device_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = FakeDriver()
    bench = Bench(driver, [driver.facts(0)], CHUNK, 1024 * 1024)
    real = driver.copy
    monkeypatch.setattr(driver, "copy", lambda to, source, nbytes, stream: real(to, source + 16, nbytes - 16, stream))
    with pytest.raises(DeviceFailed, match="does not hold"):
        bench.measure_loaded(bench.devices)
    bench.close()
