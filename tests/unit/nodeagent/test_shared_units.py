"""Weights that instances of a separate device share are charged once.

Each instance books 100 bytes, of which 80 are weights, unless a test says otherwise.
"""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.nodeagent.domain.memory import Ledger
from shared.errors import InsufficientMemory
from shared.unit_charges import BookedWeights, SharedUnits

DEVICE = ("cpu:1",)
BASE, TUNED = BookedWeights("base", 80), BookedWeights("tuned", 80)
LOADED = SharedUnits(mapped_bytes=80, unmapped={"base": 0, "tuned": 16}, exclusive={"base": 16})
"""The base is mapped. The fine-tune consists of 64 bytes of the base and 16 bytes of its own."""


def ledger(units: SharedUnits | None = None, budget: int = 150) -> Ledger:
    return Ledger({"cpu:1": budget}, units={} if units is None else {"cpu:1": units})


def test_an_instance_books_what_it_does_not_share() -> None:
    one = ledger(LOADED).book("a", DEVICE, 100, BASE)
    assert one.sum_reserved("cpu:1") == 100
    two = one.book("b", DEVICE, 100, TUNED)
    assert two.sum_reserved("cpu:1") == 100 + 16 + 20
    refused = two.refusal(DEVICE, 100, weights=BookedWeights("other", 80))
    assert isinstance(refused, InsufficientMemory)
    assert refused.should_retry


def test_without_a_report_each_instance_books_its_whole_need() -> None:
    assert ledger().book("a", DEVICE, 100, BASE).refusal(DEVICE, 100, weights=TUNED) is not None


def test_the_last_of_several_sharers_is_charged_in_full() -> None:
    two = ledger(LOADED).book("a", DEVICE, 100, BASE).book("b", DEVICE, 100, TUNED)
    assert two.remove_booking("a").sum_reserved("cpu:1") == 100
    assert two.remove_booking("b").sum_reserved("cpu:1") == 100


def test_replicas_of_one_model_share_all_of_its_weights() -> None:
    two = ledger(LOADED).book("a", DEVICE, 100, BASE).book("b", DEVICE, 100, BASE)
    assert two.sum_reserved("cpu:1") == 120


def test_weights_of_unknown_units_are_charged_in_full() -> None:
    two = ledger(LOADED, budget=400).book("a", DEVICE, 100, BASE).book("b", DEVICE, 100, BookedWeights("new", 80))
    assert two.sum_reserved("cpu:1") == 200


def test_weights_are_charged_with_the_whole_pages_that_they_fill() -> None:
    small = BookedWeights("small", 80, rounding_bytes=50)
    one = ledger(SharedUnits(), budget=400).book("a", DEVICE, 100, small)
    assert one.sum_reserved("cpu:1") == 150
    assert one.book("b", DEVICE, 100, small).sum_reserved("cpu:1") == 150 + 20, "replicas share them"
    assert ledger(SharedUnits(), budget=149).refusal(DEVICE, 100, weights=small) is not None


def test_instances_without_pages_share_nothing() -> None:
    both = ledger(LOADED, budget=400).book("a", DEVICE, 100, BASE).book("b", DEVICE, 100)
    assert both.sum_reserved("cpu:1") == 200


LENDING = SharedUnits(is_lending=True)


def test_caches_that_borrow_pages_book_their_floors_and_the_largest_growth() -> None:
    """Of 100 bytes each, 80 are weights and the floor is 5: 15 of growth count once."""
    one, two = (BookedWeights(name, 80, elastic_bytes=15) for name in ("one", "two"))
    both = ledger(LENDING, budget=185).book("a", DEVICE, 100, one).book("b", DEVICE, 100, two)
    assert both.sum_reserved("cpu:1") == 185
    larger = BookedWeights("three", 80, elastic_bytes=40)
    assert both.refusal(DEVICE, 125, weights=larger) is not None
    three = Ledger({"cpu:1": 295}, both.bookings, both.units).book("c", DEVICE, 125, larger)
    assert three.sum_reserved("cpu:1") == 3 * 85 + 40
    assert three.remove_booking("c").sum_reserved("cpu:1") == 185


def test_caches_of_a_device_that_does_not_lend_are_booked_whole() -> None:
    one, two = (BookedWeights(name, 80, elastic_bytes=15) for name in ("one", "two"))
    both = ledger(SharedUnits(), budget=200).book("a", DEVICE, 100, one).book("b", DEVICE, 100, two)
    assert both.sum_reserved("cpu:1") == 200


_UNITS = st.frozensets(st.integers(0, 7), min_size=1)
_NAMES = ("a", "b", "c", "d")


@given(
    st.fixed_dictionaries(dict.fromkeys(_NAMES, _UNITS)),
    st.sets(st.sampled_from(_NAMES)),
    st.sets(st.sampled_from(_NAMES)),
    st.lists(st.sampled_from(_NAMES)),
    st.integers(0, 1),
)
def test_the_charge_is_never_less_than_the_pages_of_the_instances(
    units: dict[str, frozenset[int]], mapped_at_report: set[str], known: set[str], running: list[str], rounding: int
) -> None:
    """The report may be older than the instances, and need not know their weights.

    Pages have a byte here, and `rounding` is the part of a page that the weights do not fill.
    """
    mapped = frozenset[int]().union(*(units[n] for n in mapped_at_report))
    known |= mapped_at_report
    others = {n: frozenset[int]().union(*(units[m] for m in known - {n})) for n in known}
    report = SharedUnits(
        len(mapped),
        {n: len(units[n] - mapped) for n in known},
        {n: len((units[n] & mapped) - others[n]) for n in known},
    )
    booked = [BookedWeights(n, len(units[n]) - rounding, rounding_bytes=rounding) for n in running]
    pages = len(frozenset[int]().union(*(units[n] for n in running)))
    ended = [BookedWeights(n, len(units[n]) - rounding, rounding_bytes=rounding) for n in _NAMES if n not in running]
    for gone in ((), ended):
        charge = sum(b.nbytes for b in booked) - report.saving(booked, gone)
        assert pages <= charge <= sum(b.nbytes + b.rounding_bytes for b in booked)
