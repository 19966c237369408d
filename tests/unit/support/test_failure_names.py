"""The line of a failed test."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.support.launcher import ROOT

_TESTS = """
import pytest

@pytest.fixture
def broken():
    raise ValueError("setup")

def test_passes(): pass
def test_fails(): assert 0
def test_has_no_setup(broken): pass
"""


def test_failed_tests_are_named_before_the_report(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(_TESTS)
    (tmp_path / "conftest.py").write_text(
        "from tests.support.failure_names import FailureNames\n"
        "def pytest_configure(config): config.pluginmanager.register(FailureNames(config))\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "--rootdir", str(tmp_path), "-p", "no:cacheprovider", str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False)
    progress = done.stdout.partition("= FAILURES =")[0].partition("= ERRORS =")[0]
    named = [line.partition(" (")[0] for line in progress.splitlines() if line.startswith("FAILED")]
    assert named == ["FAILED test_some.py::test_fails", "FAILED test_some.py::test_has_no_setup"], done.stdout + done.stderr
