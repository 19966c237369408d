"""A scheduler's world for each test."""

from __future__ import annotations

import pytest

from tests.unit.scheduler.world import World


@pytest.fixture
def w() -> World:
    return World()
