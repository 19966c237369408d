"""Values that a transaction computes once, until its state changes."""

from __future__ import annotations

from services.scheduler.domain.policy import Policy
from services.scheduler.domain.state.cluster import ClusterState
from services.scheduler.domain.state.transaction import Transaction
from services.scheduler.domain.state.volatile import Cooldown, Unschedulable


def test_memoized_value_is_computed_again_after_a_change() -> None:
    tx = Transaction(ClusterState(1), 1.0, Policy())
    computed: list[int] = []

    def compute() -> int:
        computed.append(0)
        return len(tx.state.cooldowns)

    assert [tx.memoize("pauses", compute), tx.memoize("pauses", compute)] == [0, 0]
    assert len(computed) == 1
    tx.put(Unschedulable("m", 1.0, "no device has room"))
    assert tx.memoize("pauses", compute) == 0
    assert len(computed) == 1, "notes about models that wait are no change"
    tx.put(Cooldown("i", 2.0))
    assert tx.memoize("pauses", compute) == 1
    tx.drop(Cooldown, "i")
    assert tx.memoize("pauses", compute) == 0
    assert len(computed) == 3
