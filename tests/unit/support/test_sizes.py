"""`make test-long` runs each module in full that `make test` makes smaller."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.support.forking import ROOT

_IMPORT = "from tests.support.sizes import size\n"


def resized_modules() -> set[str]:
    """Return the test modules with reduced sizes: their own, or those of helpers."""
    sources = {file.relative_to(ROOT): file.read_text() for file in (ROOT / "tests").rglob("*.py")}
    found, new = set[Path](), {path for path, source in sources.items() if _IMPORT in source}
    while new:
        found |= new
        imports = [f"from {'.'.join(path.with_suffix('').parts)} import " for path in new]
        new = {path for path, source in sources.items() if any(line in source for line in imports)} - found
    return {str(path) for path in found if path.name.startswith("test_")}


def test_make_test_long_runs_every_module_with_reduced_sizes() -> None:
    command = ["make", "--dry-run", "--assume-old=.venv/.installed", "test-long"]
    words = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    named = {word for word in words if word.endswith(".py")}
    resized = resized_modules()
    assert "tests/integration/engine/test_kv_process.py" in resized, "its requests are those of engine_pair.py"
    assert sorted(resized - named) == []
