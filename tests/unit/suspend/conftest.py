"""Room for the fake drivers' gigabytes, on any machine."""

from __future__ import annotations

import pytest

from services.nodeagent.suspend import cuda


@pytest.fixture(autouse=True)
def room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "available_bytes", lambda: 1 << 40)
