"""Paced links: when copies end."""

from __future__ import annotations

import pytest

from weights.devices.pacing import Pacer


def test_copies_follow_one_another_at_the_pace() -> None:
    pacer = Pacer(100.0)
    assert [pacer.book(50, now) for now in (10.0, 10.1, 20.0)] == [10.5, 11.0, 20.5]


def test_a_pace_must_be_over_0() -> None:
    with pytest.raises(ValueError, match="must be over 0"):
        Pacer(0)
