"""The invariants of cluster_machine.py under every profile; decisions are repeatable.

The tests make each decision twice.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from simulator.policies import PROFILES
from tests.unit.scheduler.cluster_machine import Cluster


@pytest.mark.parametrize("profile", sorted(PROFILES.keys() - {"thaw"}))
def test_cluster_invariants_hold_under_every_profile(profile: str) -> None:
    machine = type(f"Cluster_{profile.replace('-', '_')}", (Cluster,), {"profile": profile})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=6,
            stateful_step_count=25,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
        ),
    )
