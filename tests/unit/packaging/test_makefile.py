"""`make test` runs all parts of the suite, and `make -n test` none."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
PYTEST = """#!/bin/sh
echo "$*" >> "$(dirname "$0")/../ran"
case "$*" in *"-n "*) exit $FIRST_STATUS;; esac
"""


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    """Return a virtual environment with a pytest that only records how it is called."""
    program = tmp_path / "bin" / "pytest"
    program.parent.mkdir()
    program.write_text(PYTEST)
    program.chmod(0o755)
    (tmp_path / ".installed").touch()
    return tmp_path


def run_make(environment: Path, *arguments: str, first_status: int = 0) -> tuple[int, list[str]]:
    """Run make; return its status and the arguments of each pytest that it ran."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    done = subprocess.run(
        ["make", "--no-print-directory", *arguments, f"VENV={environment}"],
        cwd=ROOT,
        env=variables | {"FIRST_STATUS": str(first_status)},
        check=False,
        capture_output=True,
        timeout=60,
    )
    record = environment / "ran"
    return done.returncode, record.read_text().splitlines() if record.exists() else []


def test_a_dry_run_of_the_tests_runs_nothing(environment: Path) -> None:
    assert run_make(environment, "-n", "test") == (0, [])


@pytest.mark.parametrize("first_status", [0, 1])
def test_each_part_of_the_suite_runs_and_a_failure_of_the_first_is_reported(environment: Path, first_status: int) -> None:
    status, ran = run_make(environment, "test", first_status=first_status)
    assert (status != 0) is (first_status != 0)
    assert len(ran) == 3
    assert "--dist loadscope" in ran[0]
    assert sum("engines_real" in arguments for arguments in ran[1:]) == 2
