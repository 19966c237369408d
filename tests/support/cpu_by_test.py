"""Measure the CPU time of each test, with all processes that it starts: `make test-cpu`.

A pytest plug-in (`pytest -p tests.support.cpu_by_test`). Each test process enters a cgroup of its
own, which its children inherit, and whose counter keeps the time of those that have ended. The
summary ranks folders, modules and tests; the first test's setup includes the collection. It needs
root. Containers have cgroups of their own and do not count.
"""

from __future__ import annotations

import contextlib
import os
from collections import defaultdict
from collections.abc import Generator
from pathlib import Path

import pytest

_ROOT = Path("/sys/fs/cgroup")
_PROPERTY = "cpu_s"
_PHASES = ("setup", "call", "teardown")
_ROWS = int(os.environ.get("THAW_TEST_CPU_ROWS", "40"))
"""Rows of each ranking."""


class CpuCounter:
    """The CPU time of this process and of all that it starts from here on, in cgroup v1 or v2."""

    def __init__(self) -> None:
        is_v1 = (_ROOT / "cpuacct").is_dir()
        parent = _ROOT / "cpuacct" if is_v1 else _ROOT
        self._parent, self._folder = parent, parent / f"thaw-test-cpu-{os.getpid()}"
        self._folder.mkdir(exist_ok=True)
        (self._folder / "cgroup.procs").write_text(str(os.getpid()))
        self._is_v1 = is_v1
        # Open until the end: a test may replace what opens files.
        self._usage = os.open(self._folder / ("cpuacct.usage" if is_v1 else "cpu.stat"), os.O_RDONLY)

    def total_s(self) -> float:
        text = os.pread(self._usage, 4096, 0).decode()
        if self._is_v1:
            return int(text) / 1e9
        return int(dict(line.split() for line in text.splitlines())["usage_usec"]) / 1e6

    def close(self) -> None:
        """Leave the cgroup, and remove it unless processes are left in it."""
        os.close(self._usage)
        (self._parent / "cgroup.procs").write_text(str(os.getpid()))
        with contextlib.suppress(OSError):
            self._folder.rmdir()


class Measuring:
    """Adds the CPU time of each phase to its report."""

    def __init__(self) -> None:
        self._counter = CpuCounter()
        self._before_s = self._counter.total_s()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        now_s = self._counter.total_s()
        report.user_properties = [*report.user_properties, (f"{_PROPERTY}_{report.when}", now_s - self._before_s)]
        self._before_s = now_s
        return report

    def pytest_unconfigure(self) -> None:
        self._counter.close()


class Summary:
    """Collects the reports' CPU times and prints the rankings."""

    def __init__(self) -> None:
        self._by_test: dict[str, dict[str, float]] = defaultdict(lambda: dict.fromkeys(_PHASES, 0.0))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        cpu_s = dict(report.user_properties).get(f"{_PROPERTY}_{report.when}")
        if isinstance(cpu_s, float) and report.when is not None:
            self._by_test[report.nodeid][report.when] += cpu_s

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        def folder(test: str) -> str:
            return "/".join(test.split("::")[0].split("/")[1:3])

        for title, key in (("folder", folder), ("module", lambda t: t.split("::")[0]), ("test", lambda t: t)):
            rows: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0, 0])
            for test, phases in self._by_test.items():
                row = rows[key(test)]
                for i, phase in enumerate(_PHASES):
                    row[i] += phases[phase]
                row[3] += 1
            terminalreporter.section(f"CPU seconds by {title}: total, setup, call, teardown, tests")
            ranked = sorted(rows.items(), key=lambda item: -sum(item[1][:3]))
            for name, (setup, call, teardown, count) in ranked[:_ROWS]:
                total = setup + call + teardown
                terminalreporter.write_line(f"{total:8.2f} {setup:8.2f} {call:8.2f} {teardown:8.2f} {count:5.0f} {name}")
            terminalreporter.write_line(f"{sum(sum(row[:3]) for row in rows.values()):8.2f} in all")


def pytest_configure(config: pytest.Config) -> None:
    is_controller = not hasattr(config, "workerinput")
    if is_controller:
        config.pluginmanager.register(Summary())
    if not is_controller or not config.getoption("numprocesses", None):
        config.pluginmanager.register(Measuring())
