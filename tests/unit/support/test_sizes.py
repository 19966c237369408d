"""What `make test` makes smaller, `make test-long` runs in full."""

from __future__ import annotations

import subprocess

from tests.support.forking import ROOT

_IMPORT = "from tests.support.sizes import size\n"


def test_make_test_long_runs_every_module_with_reduced_sizes() -> None:
    command = ["make", "--dry-run", "--assume-old=.venv/.installed", "test-long"]
    words = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    named = {word for word in words if word.endswith(".py")}
    resized = {str(file.relative_to(ROOT)) for file in (ROOT / "tests").rglob("test_*.py") if _IMPORT in file.read_text()}
    assert resized
    assert sorted(resized - named) == []
