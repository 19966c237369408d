"""The meters of a hosted engine."""

from __future__ import annotations

import time
from typing import cast

import pytest

from services.enginehost.server.serving import Serving
from shared.messaging import Mesh


def test_cause_with_work_is_kept_longer_than_causes_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else its meter would begin again, and the ledger would miss that work."""
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    serving = Serving(cast(Mesh, None))
    for n in range(200):
        for cause in ("at work", f"other {n}"):
            with serving.work(f"prepare {n}", cause):
                now += 0.5
    found = {work.plan_id: work.seconds for work in serving.load().background}
    assert found["at work"] == pytest.approx(100.0)
    assert len(found) <= 65
