"""The description of the machine and the command in a benchmark's file."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from bench.report import gpus

WRITE = "from pathlib import Path; from bench.report import write; write(Path(sys.argv[1]), {'a': 1.5})"


def nvml(count: int) -> SimpleNamespace:
    return SimpleNamespace(
        nvmlDeviceGetCount=lambda: count,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetName=lambda device: b"H200" if device else "H100",
        nvmlDeviceGetMemoryInfo=lambda device: SimpleNamespace(total=(80 + device) << 30),
        nvmlSystemGetDriverVersion=lambda: "580.1",
    )


@pytest.mark.parametrize("without", [None, nvml(0)])
def test_a_machine_without_gpus_has_no_entry_for_them(without: SimpleNamespace | None) -> None:
    assert gpus(without) == {}


def test_all_gpus_are_named_with_their_memory_and_driver() -> None:
    assert gpus(nvml(2)) == {"gpus": "H100, 80 GiB; H200, 81 GiB", "nvidia_driver": "580.1"}


def test_the_file_has_the_command_that_measured(tmp_path: Path) -> None:
    program = tmp_path / "measured"
    program.mkdir()
    (program / "__init__.py").touch()
    (program / "deep.py").write_text(f"import sys\n{WRITE}\n")
    out, root = tmp_path / "f.json", Path(__file__).parents[3]
    command = [sys.executable, "-m", "measured.deep", str(out)]
    subprocess.run(command, cwd=tmp_path, env={"PYTHONPATH": f"{tmp_path}:{root}"}, check=True)
    found = json.loads(out.read_text())
    assert found["figures"] == {"a": 1.5}
    assert found["commands"] == [f"python -m measured.deep {out}"]
