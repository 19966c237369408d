"""The ranking of tests by CPU time."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.cpu_by_test import Summary

_FOLDERS = ("/sys/fs/cgroup/cpuacct", "/sys/fs/cgroup/cgroup.controllers")
_BURN = "import time\nwhile time.process_time() < 0.3: pass"
_COUNT = f"""
import subprocess, sys
from tests.support.cpu_by_test import CpuCounter
counter = CpuCounter()
before_s = counter.total_s()
subprocess.run([sys.executable, "-c", {_BURN!r}], check=True)
print(counter.total_s() - before_s)
counter.close()
"""


class Lines:
    """The terminal of a run."""

    def __init__(self) -> None:
        self.sections: dict[str, list[str]] = {}

    def section(self, title: str) -> None:
        self.sections[title.partition(":")[0].rpartition(" ")[2]] = self._lines = list[str]()

    def write_line(self, line: str) -> None:
        self._lines.append(" ".join(line.split()))


def _report(test: str, when: str, cpu_s: float) -> pytest.TestReport:
    properties: list[tuple[str, object]] = [(f"cpu_s_{when}", cpu_s)]
    return pytest.TestReport(test, (test, 0, ""), {}, "passed", None, when, user_properties=properties)  # type: ignore[arg-type]


def test_folders_modules_and_tests_are_ranked_by_the_time_of_all_phases() -> None:
    summary, lines = Summary(), Lines()
    for test, when, cpu_s in (
        ("tests/unit/a/test_x.py::one", "setup", 0.5),
        ("tests/unit/a/test_x.py::one", "call", 1.0),
        ("tests/unit/a/test_y.py::two", "call", 2.0),
        ("tests/e2e/test_z.py::three", "teardown", 3.0),
    ):
        summary.pytest_runtest_logreport(_report(test, when, cpu_s))
    summary.pytest_terminal_summary(lines)  # type: ignore[arg-type]  # the methods that it uses
    assert lines.sections["folder"] == [
        "3.50 0.50 3.00 0.00 2 unit/a", "3.00 0.00 0.00 3.00 1 e2e/test_z.py", "6.50 in all",
    ]  # fmt: skip
    assert [line.split()[-1] for line in lines.sections["module"][:-1]] == [
        "tests/e2e/test_z.py", "tests/unit/a/test_y.py", "tests/unit/a/test_x.py",
    ]  # fmt: skip
    assert lines.sections["test"][-2] == "1.50 0.50 1.00 0.00 1 tests/unit/a/test_x.py::one"


@pytest.mark.root
@pytest.mark.skipif(
    os.geteuid() != 0 or not any(Path(folder).exists() for folder in _FOLDERS),
    reason="needs root and a cgroup that counts CPU time",
)
def test_processes_that_have_ended_are_counted() -> None:
    done = subprocess.run([sys.executable, "-c", _COUNT], capture_output=True, text=True, check=True)
    assert float(done.stdout) >= 0.3
