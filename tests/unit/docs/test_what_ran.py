"""The table of what was run equals the committed results, and the recorder counts outcomes."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.support.what_ran import OPTION

ROOT = Path(__file__).resolve().parents[3]
_generator: dict[str, Any] = runpy.run_path(str(ROOT / "docs" / "generate_what_ran.py"))
_TESTS = """\
import pytest

@pytest.mark.runs("builtin", "llama")
@pytest.mark.parametrize("number", range(3))
def test_of_llama(number):
    if number == 1:
        pytest.skip("not here")
    assert number != 2

def test_of_nothing():
    pass
"""


def test_page_equals_the_results() -> None:
    assert (ROOT / "docs" / "what-ran.md").read_text() == _generator["page"](), (
        "run: python docs/generate_what_ran.py > docs/what-ran.md"
    )


def test_section_of_a_machine_names_its_gpus() -> None:
    machine = {"processor": "P", "architecture": "x86_64", "cores": 16, "system": "Linux", "python": "3.11"}
    section = _generator["_section"]
    assert "16 cores, 2 NVIDIA H100, Linux" in section({"machine": machine | {"gpus": ["NVIDIA H100"] * 2}, "rows": []})
    assert "16 cores, no GPU, Linux" in section({"machine": machine | {"gpus": []}, "rows": []})


def test_rows_have_a_version_and_a_passed_test() -> None:
    for path in (ROOT / "docs" / "what-ran.d").glob("*.json"):
        for row in json.loads(path.read_text())["rows"]:
            assert row["version"]
            assert row["passed"]
            assert (ROOT / row["file"]).is_file()


def test_outcomes_are_counted_and_other_rows_kept(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text("from tests.conftest import *")
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = runs")
    (tmp_path / "test_engine.py").write_text(_TESTS)
    out = tmp_path / "out.json"
    other = {"engine": "vllm", "version": "v", "family": "llama", "file": "test_other.py", "passed": 1, "failed": 0, "skipped": 0}
    replaced = other | {"engine": "builtin", "file": "test_engine.py", "passed": 9}
    out.write_text(json.dumps({"rows": [other, replaced]}))
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", OPTION, str(out)]
    done = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1, done.stdout + done.stderr
    found = json.loads(out.read_text())
    assert found["machine"]["processor"]
    builtin, vllm = found["rows"]
    assert vllm == other
    assert builtin.pop("version").startswith("torch ")
    assert builtin == {"engine": "builtin", "family": "llama", "file": "test_engine.py", "passed": 1, "failed": 1, "skipped": 1}
