"""Name each failed test at once.

pytest reports failures at the end of a run, which is up to an hour later.
"""

from __future__ import annotations

import pytest


class FailureNames:
    """Writes a line for each failed test; registered where the report is written."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        terminal = self._config.pluginmanager.get_plugin("terminalreporter")
        if report.failed and terminal is not None:
            terminal.write(f"\nFAILED {report.nodeid} ({report.when}, after {report.duration:.0f} s)\n", flush=True)
