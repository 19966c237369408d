"""Memory held over time: all that devices have reserved is charged, once, to the models there."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.domain.holdings import HOUR_S, Charge, Holding, charge, list_cached, list_holdings
from shared.contracts.loader import CachedModel, LoaderStatus
from shared.contracts.node import InstanceState
from tests.support.node_statuses import SUSPENDED, instance, status


def since_ever(instance_id: str) -> float:
    return 0.0


def by_model(holdings: tuple[Holding, ...]) -> dict[tuple[str, str], float]:
    return {(h.model, h.kind): h.nbytes for h in holdings}


def test_a_device_is_charged_to_its_instances_in_proportion() -> None:
    found = list_holdings(
        status({"cpu:0": 900, "cuda:0": 500}, instance("a", 400, "cpu:0"), instance("b", 1000, "cpu:0", "cuda:0"))
    )
    assert by_model(found[:2]) == {("a", "cpu"): 400, ("b", "cpu"): 500}
    assert by_model(found[2:]) == {("b", "cuda"): 500}


def test_shared_units_and_executors_are_charged_once() -> None:
    """Both reserve the units of one base, which the device has once, beside an executor."""
    found = list_holdings(status({"cpu:0": 700}, instance("a", 400, "cpu:0"), instance("b", 400, "cpu:0")))
    assert by_model(found) == {("a", "cpu"): 350, ("b", "cpu"): 350}
    assert by_model(list_holdings(status({"cpu:0": 300}))) == {("", "cpu"): 300}
    assert list_holdings(status({"cpu:0": 0}, instance("a", 0, "cpu:0", state=InstanceState.STOPPED))) == ()


def test_a_suspended_engine_holds_its_rest_and_its_snapshot() -> None:
    found = list_holdings(status({"cuda:0": 30}, instance("a", 30, "cuda:0", state=SUSPENDED, snapshot=970)))
    assert by_model(found) == {("a", "cuda"): 30, ("a", "host"): 970}


def test_cached_weights_and_the_rest_of_the_cache_are_its_memory() -> None:
    cached = (
        CachedModel(weights_id="r.layers-0-2-4", tier="dram", nbytes=300),
        CachedModel(weights_id="s", tier="dram", nbytes=100),
        CachedModel(weights_id="s", tier="ssd", nbytes=100),
    )
    found = list_cached(LoaderStatus(node="n", boot_id="b", cached=cached, dram_bytes=450))
    assert by_model(found) == {("r", "cache"): 300, ("s", "cache"): 100, ("", "cache"): 50}
    assert list_cached(LoaderStatus(node="n", boot_id="b")) == ()


def test_an_interval_is_split_at_the_hour() -> None:
    held = (Holding("a-1", "a", "cpu", 10.0),)
    start = 5 * HOUR_S - 2.0
    assert charge(held, held, (start, start + 5), since_ever, 60) == {(4, "a", "cpu"): 20.0, (5, "a", "cpu"): 30.0}


def test_over_a_long_silence_only_survivors_are_charged() -> None:
    before = (Holding("a-1", "a", "cpu", 10.0), Holding("b-1", "b", "cpu", 10.0), Holding("", "", "cpu", 5.0))
    after = (Holding("a-1", "a", "cpu", 10.0), Holding("b-2", "b", "cpu", 10.0))
    assert charge(before, after, (0.0, 100.0), since_ever, 5.0) == {(0, "a", "cpu"): 1000.0}
    assert charge(before, after, (0.0, 4.0), since_ever, 5.0) == {
        (0, "a", "cpu"): 40.0,
        (0, "b", "cpu"): 40.0,
        (0, "", "cpu"): 20.0,
    }


def test_an_instance_is_not_charged_for_the_time_before_its_start() -> None:
    held = (Holding("a-1", "a", "cpu", 10.0),)
    assert charge(held, held, (0.0, 100.0), lambda _: 97.0, 5.0) == {(0, "a", "cpu"): 30.0}
    assert charge(held, held, (0.0, 100.0), lambda _: 200.0, 5.0) == {}


@given(
    st.lists(
        st.tuples(st.floats(0.1, 4.0), st.lists(st.integers(1, 10**9), max_size=4), st.integers(0, 10**9)), min_size=2, max_size=20
    )
)
def test_the_sum_is_the_integral_of_the_reserved_bytes(reports: list[tuple[float, list[int], int]]) -> None:
    """Instances start and end; they share bytes, and an executor takes more."""
    now, integral, previous = HOUR_S - 10.0, 0.0, None
    charges: dict[Charge, float] = {}
    reserved = 0
    for step, sizes, more in reports:
        held = list_holdings(
            status({"cpu:0": sum(sizes) + more}, *(instance(f"m{i}-{i}", size, "cpu:0") for i, size in enumerate(sizes)))
        )
        if previous is not None:
            integral += reserved * step
            for what, amount in charge(previous, held, (now, now + step), since_ever, 5.0).items():
                charges[what] = charges.get(what, 0.0) + amount
            now += step
        previous, reserved = held, sum(sizes) + more
    assert sum(charges.values()) == pytest.approx(integral, rel=1e-9)
