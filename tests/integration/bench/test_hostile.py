"""Short run of `bench.hostile`: each hostile body gets a refusal or a result.

No body makes the gateway's memory grow out of proportion.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
_PER_BYTE = 60
"""Bytes of memory for each byte sent.

The benchmark's goal is 20; an unbounded prompts times n took thousands.
"""


def test_no_hostile_body_breaks_the_gateway(tmp_path: Path) -> None:
    out = tmp_path / "hostile.json"
    command = [sys.executable, "-m", "bench.hostile", "--short", "--seconds", "0.5", "--json", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=170, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    figures: dict[str, float] = json.loads(out.read_text())["figures"]
    statuses = {n.removesuffix(".status"): v for n, v in figures.items() if n.endswith(".status")}
    assert len(statuses) >= 15
    assert all(v < 500 for v in statuses.values()), statuses
    assert statuses["json: null messages"] == 413
    assert statuses["json: brackets in text"] == 200, "text costs nothing"
    assert figures["worst.memory_per_byte"] < _PER_BYTE
    assert figures["crowd.idle_connections"] == 500
