"""Invariants over random events.

No double booking, no unrequested eviction, every request answered.
"""

from __future__ import annotations

from hypothesis import HealthCheck, settings

from tests.support.examples import examples
from tests.unit.scheduler.cluster_machine import Cluster

TestCluster = Cluster.TestCase
TestCluster.settings = settings(
    max_examples=examples(60),
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
