"""Policies by name: Thaw's own, registered ones, and an invalid registration."""

from __future__ import annotations

from importlib.metadata import EntryPoint

import pytest

from services.scheduler import profiles
from services.scheduler.profiles import profile_named
from shared.errors import InvalidRequest
from shared.policies import ENTRY_POINTS
from simulator.policies import PROFILES


@pytest.mark.parametrize("name", sorted(PROFILES))
def test_every_policy_is_found_by_name(name: str) -> None:
    assert profile_named(name) is PROFILES[name]


def test_unknown_policy_error_lists_the_known_names() -> None:
    with pytest.raises(InvalidRequest, match=r"no scheduling policy 'best'; there are thaw, .*torpor"):
        profile_named("best")


def test_entry_point_that_is_not_a_profile_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = EntryPoint("wrong", "simulator.policies:PROFILES", ENTRY_POINTS)
    monkeypatch.setattr(profiles, "registered_policies", lambda: {"wrong": wrong})
    with pytest.raises(InvalidRequest, match="is not a Profile"):
        profile_named("wrong")
