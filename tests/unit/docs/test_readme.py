"""README.md fits a screen, and its waterfall is one that `thaw trace` can have drawn."""

from __future__ import annotations

import re
from pathlib import Path

README = (Path(__file__).resolve().parents[3] / "README.md").read_text()
_LINES = 90


def test_the_readme_is_short() -> None:
    assert len(README.splitlines()) <= _LINES
    assert all(len(line) <= 125 for line in README.splitlines() if not line.startswith("|"))


def test_the_parts_of_the_waterfall_sum_to_the_ttft() -> None:
    (block,) = re.findall(r"^```\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)[1:]
    head, ttft, *rest = block.splitlines()
    assert re.match(r"[\w.-]+  \w+  request req_[0-9a-f]{32}$", head)
    shown = re.match(r"TTFT ([\d.]+ m?s) ", ttft)
    rows = [line for line in rest if re.match(r"[a-z]+ .*[\d.]", line) and not line.startswith("phase")]
    *parts, total = [row.split()[-1] for row in rows if "█" in row or row.startswith("total")]
    assert shown is not None
    assert sum(int(part) for part in parts if part != "<1") == int(total)
    assert shown[1] == (f"{int(total) / 1e3:.2f} s" if int(total) >= 1000 else f"{total} ms")
    starts = [float(row.split()[-3 if "█" in row else -2]) for row in rows if not row.startswith("total")]
    assert starts == sorted(starts)
