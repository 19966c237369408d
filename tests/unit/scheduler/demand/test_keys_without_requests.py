"""Keys that a gateway names although none of their requests waits or is in flight."""

from __future__ import annotations

from services.scheduler.domain.demand.key_shares import _parts
from shared.contracts.demand import KeyDemand


def test_keys_without_requests_pay_nothing() -> None:
    """A division by zero would fail each tick of the leader."""
    assert _parts([KeyDemand(flow="a"), KeyDemand(flow="b", priority=1)]) == {}
    assert _parts([KeyDemand(flow="a", waiting=1, weight=2.0), KeyDemand(flow="b")]) == {("a", 0): 0.5, ("b", 0): 0.0}
