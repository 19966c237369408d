"""Invariants of groups on several nodes over random events.

No memory is promised twice; the stages of a group start together or not at all; no claim waits for
another one for ever; no promise of a full worker is left behind by its group.
"""

from __future__ import annotations

from hypothesis import HealthCheck, settings

from tests.support.examples import examples
from tests.unit.scheduler.group_machine import Groups

TestGroups = Groups.TestCase
TestGroups.settings = settings(
    max_examples=examples(40),
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
