"""`thaw init` and `thaw doctor` report GPUs whose driver is missing or fails."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from thaw.cli.init import find_gpus
from thaw.launcher import checks


class NvmlError(Exception):
    """As pynvml raises it."""


def fail(*_: object) -> None:
    raise NvmlError("Driver/library version mismatch")


def nvml(**calls: object) -> SimpleNamespace:
    working = {
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlSystemGetDriverVersion": lambda: "580.1",
        "nvmlDeviceGetCount": lambda: 0,
    }
    return SimpleNamespace(NVMLError=NvmlError, **working | calls)


@pytest.mark.parametrize(
    ("module", "level", "says"),
    [
        (None, "warn", "nvidia-ml-py is not installed"),
        (nvml(nvmlInit=fail), "ok", "none with an NVIDIA driver"),
        (nvml(nvmlDeviceGetCount=fail), "warn", "Driver/library version mismatch"),
    ],
    ids=["no package", "no driver", "failing driver"],
)
def test_gpus_that_cannot_be_read_are_no_error(
    monkeypatch: pytest.MonkeyPatch, module: SimpleNamespace | None, level: str, says: str
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", module)
    (finding,) = checks._gpus()
    assert (finding.subject, finding.level) == ("gpu", level)
    assert says in finding.text
    assert find_gpus() == ()


def test_driver_without_gpus_yields_no_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", nvml())
    assert list(checks._gpus()) == []
