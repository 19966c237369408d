"""Drivers here hold gigabytes that are numbers only: whatever the machine has, there is room for them."""

from __future__ import annotations

import pytest

from services.nodeagent.suspend import cuda


@pytest.fixture(autouse=True)
def room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "available_bytes", lambda: 1 << 40)
