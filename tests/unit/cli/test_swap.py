"""Swap for suspension: its size, its commands, the report if it is unavailable."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from shared.contracts.findings import Finding
from thaw.errors import CommandError
from thaw.launcher import checks, swap
from thaw.launcher.home import Home


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write scripts that stand in for the swap programs and record their arguments."""
    directory = tmp_path / "bin"
    directory.mkdir()
    for name in ("fallocate", "chmod", "mkswap", "swapon"):
        script = directory / name
        script.write_text(f'#!/bin/sh\necho "{name} $*" >> {tmp_path}/asked\n[ "{name}" = fallocate ] && : > "$3"\nexit 0\n')
        script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{directory}:/usr/bin:/bin")
    return directory


def test_swap_file_is_created_by_four_commands(tmp_path: Path, programs: Path) -> None:
    path = tmp_path / "home" / "swap" / "swapfile"
    swap.set_up(path, 2 * swap.GIB)
    assert (tmp_path / "asked").read_text().splitlines() == [
        f"fallocate -l {2 * swap.GIB} {path}",
        f"chmod 600 {path}",
        f"mkswap {path}",
        f"swapon {path}",
    ]


def test_an_unusable_swap_file_is_removed_and_the_commands_are_printed(tmp_path: Path, programs: Path) -> None:
    (programs / "swapon").write_text("#!/bin/sh\necho 'swapon: Operation not permitted' >&2\nexit 255\n")
    path = tmp_path / "swapfile"
    with pytest.raises(CommandError, match="Operation not permitted") as failed:
        swap.set_up(path, swap.GIB)
    assert not path.exists()
    assert "mkswap" in failed.value.remedy


def test_missing_programs_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(CommandError, match="could not be run"):
        swap.set_up(tmp_path / "swapfile", swap.GIB)


def test_a_full_disk_is_not_filled_further(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match="no room"):
        swap.set_up(tmp_path / "swapfile", 0)


def finding(home: Path) -> Finding:
    return checks._suspending(Home(home))


def test_doctor_names_what_suspension_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(swap, "swap", lambda: swap.Swap(0, 0))
    without = finding(tmp_path)
    assert without.level == "warn"
    assert "no swap" in without.text
    assert "swapfile" in without.remedy
    monkeypatch.setattr(swap, "swap", lambda: swap.Swap(4 * swap.GIB, 3 * swap.GIB))
    monkeypatch.setattr(swap, "missing_capabilities", lambda: ["CAP_SYS_NICE"])
    assert "--cap-add CAP_SYS_NICE" in finding(tmp_path).remedy
    monkeypatch.setattr(swap, "missing_capabilities", list)
    monkeypatch.setattr(swap, "freezer", lambda: None)
    assert "control group" in finding(tmp_path).text
    monkeypatch.setattr(swap, "freezer", lambda: "cgroup v2")
    assert finding(tmp_path).level == "ok"


class Api:
    """`cuda.bindings.driver`, as of 12.8."""

    def cuCheckpointProcessLock(self) -> None: ...


@pytest.mark.parametrize(
    ("driver", "api", "level", "says"),
    [
        ("565.57.01", Api(), "warn", "driver 565.57.01 has no checkpoint calls"),
        ("580.12", None, "warn", "no cuda-bindings"),
        ("580.12", object(), "warn", "12.8 or later"),
        ("580.12", Api(), "ok", "CUDA's checkpoint"),
    ],
)
def test_doctor_names_what_gpu_suspension_lacks(
    monkeypatch: pytest.MonkeyPatch, driver: str, api: object | None, level: str, says: str
) -> None:
    def found(name: str) -> object:
        if api is None:
            raise ImportError(name)
        return api

    nvml = SimpleNamespace(
        NVMLError=OSError,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlSystemGetDriverVersion=lambda: driver,
        nvmlDeviceGetCount=lambda: 1,
        nvmlDeviceGetHandleByIndex=lambda i: i,
        nvmlDeviceGetName=lambda _: "H200",
        nvmlDeviceGetMemoryInfo=lambda _: SimpleNamespace(free=1, total=2),
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(checks, "import_module", found)
    device, suspending = checks._gpus()
    assert "cuda:0 H200" in device.text
    assert (suspending.subject, suspending.level) == ("suspend", level)
    assert says in suspending.text
    assert bool(suspending.remedy) is (level == "warn")
