"""docs/configuration.md equals the code's reference."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def test_the_reference_of_settings_is_up_to_date() -> None:
    made = subprocess.run(
        [sys.executable, "docs/generate_reference.py"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert (ROOT / "docs" / "configuration.md").read_text() == made, "run: thaw docs settings > docs/configuration.md"
