"""The benchmark of page-out by size, with few bytes."""

from __future__ import annotations

import pytest

from bench import suspend_size


@pytest.mark.usefixtures("able")
def test_a_size_is_suspended_three_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suspend_size, "SIZES", (0.0625,))
    monkeypatch.setattr(suspend_size, "JOBS", ())
    found: dict[str, list[float]] = {}
    suspend_size.sizes(lambda what, value: found.setdefault(what, []).append(value), rounds=1)
    assert {f"0.0625_gib_suspend_{order}_ms" for order in ("first", "read_again", "written_again")} <= found.keys()
    assert min(found["0.0625_gib_freed_part"]) > 0.75
    assert len(found["0.0625_gib_resume_all_touched_ms"]) == 3
