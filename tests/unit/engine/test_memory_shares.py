"""Which instance of an executor is blamed for its memory."""

from __future__ import annotations

from services.engine.domain.memory_shares import MemoryShares, charge, find_excess, join, leave


def two_instances() -> MemoryShares:
    return join(join(MemoryShares(base_bytes=100, total_bytes=100), "a", 50), "b", 50)


def test_instance_that_grows_beyond_all_reservations_is_found() -> None:
    shares = charge(charge(two_instances(), "a", 140), "b", 200)
    assert find_excess(shares) is None, "both reservations are used"
    assert find_excess(charge(shares, "b", 201)) == "b"


def test_memory_of_no_instance_and_frees_by_others_are_not_blamed() -> None:
    shares = charge(two_instances(), "a", 160)
    assert find_excess(shares) is None, "the other instance uses less"
    shares = charge(shares, "b", 110)
    assert shares.grown == {"a": 60, "b": -50}
    assert find_excess(charge(shares, None, 120)) is None
    assert find_excess(MemoryShares(base_bytes=0, total_bytes=10)) is None


def test_memory_that_a_detached_instance_leaves_behind_is_not_blamed_on_others() -> None:
    shares = charge(charge(two_instances(), "b", 120), "a", 400)
    assert find_excess(shares) == "a"
    shares = leave(shares, "a", 390)
    assert find_excess(shares) is None
    assert shares.base_bytes == 370
    assert find_excess(charge(shares, "b", 420)) is None, "its reservation is still its own"
    assert find_excess(charge(shares, "b", 421)) == "b"
    assert leave(two_instances(), "a", 100).base_bytes == 100


def test_workspace_counts_once_for_all_instances() -> None:
    shares = MemoryShares(base_bytes=100, total_bytes=100)
    for name in ("a", "b"):
        shares = join(shares, name, 10, 50)
    assert find_excess(charge(shares, "a", 100 + 50 + 2 * 10)) is None
    assert find_excess(charge(shares, "a", 100 + 50 + 2 * 10 + 1)) == "a"
