"""Charges of engines that no gateway has recorded are the owner's, until a gateway records them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.domain.background_work import find_uncounted
from services.scheduler.domain.device_accounts import SETTLED_AFTER_S, Account, AccountHistory, find_correction
from shared.contracts.engine import EngineLoad
from tests.support.node_statuses import instance, status

NAME = ("m", "cpu")


class Meter:
    """Corrects an account every few seconds, as the scheduler does."""

    def __init__(self) -> None:
        self.account, self.now = Account(), 0.0
        self._history = AccountHistory()

    def add(self, charged_us: int = 0, recorded_us: int = 0) -> None:
        self.account = replace(
            self.account, charged_us=self.account.charged_us + charged_us, recorded_us=self.account.recorded_us + recorded_us
        )

    def settle(self, after: float = SETTLED_AFTER_S) -> int:
        """Return what the owner pays."""
        self.now += after
        then = self._history.find_settled(self.now).get(NAME)
        if then is not None:
            correction = find_correction(then, self.account)
            self.account = replace(self.account, unrecorded_us=self.account.unrecorded_us + correction)
        self._history.add(self.now, {NAME: self.account})
        return self.account.unrecorded_us


@pytest.fixture
def meter() -> Meter:
    meter = Meter()
    meter.settle()
    return meter


def test_the_owner_pays_for_what_no_gateway_records(meter: Meter) -> None:
    meter.add(charged_us=100, recorded_us=60)
    assert meter.settle() == 0, "the report may be on its way"
    assert (meter.settle(), meter.settle()) == (40, 40)


def test_a_late_record_takes_it_back(meter: Meter) -> None:
    meter.add(charged_us=100)
    assert (meter.settle(), meter.settle()) == (0, 100)
    meter.add(recorded_us=70)
    assert (meter.settle(), meter.settle()) == (100, 30)


def test_reports_that_are_faster_than_the_nodes_change_nothing(meter: Meter) -> None:
    meter.add(charged_us=100, recorded_us=60)
    for _ in range(3):
        meter.settle()
    meter.add(recorded_us=500)
    assert meter.settle() == 40
    meter.add(charged_us=500)
    assert (meter.settle(), meter.settle()) == (40, 40)


def test_a_new_leader_waits_for_accounts_of_some_time_ago() -> None:
    meter = Meter()
    meter.add(charged_us=100)
    assert meter.settle(after=SETTLED_AFTER_S * 9) == 0
    assert meter.settle(after=SETTLED_AFTER_S / 2) == 0
    assert meter.settle(after=SETTLED_AFTER_S / 2) == 100


def _do(meter: Meter, delayed: list[Callable[[], None]], event: tuple[int, int, int]) -> None:
    charged, recorded_later, lost = event
    meter.add(charged_us=charged)
    recorded = charged - min(lost, charged)
    if recorded_later:
        delayed.append(lambda: meter.add(recorded_us=recorded))
    else:
        meter.add(recorded_us=recorded)


@given(st.lists(st.tuples(st.integers(0, 1000), st.integers(0, 1), st.integers(0, 100)), max_size=30))
def test_in_the_end_the_sum_is_what_the_engines_charged(events: list[tuple[int, int, int]]) -> None:
    meter, delayed = Meter(), list[Callable[[], None]]()
    meter.settle()
    for event in events:
        _do(meter, delayed, event)
        assert meter.settle() >= 0
        if len(delayed) > 3:
            delayed.pop(0)()
    for record in delayed:
        record()
    for _ in range(3):
        meter.settle()
    assert meter.account.recorded_us + meter.account.unrecorded_us == meter.account.charged_us


def test_engines_of_the_earlier_version_are_found() -> None:
    earlier = instance("old-1", 1, "cuda:0").model_copy(update={"load": EngineLoad(busy_s=1.0)})
    counted = instance("new-1", 1, "cuda:0").model_copy(update={"load": EngineLoad(busy_s=1.0, charged_s=0.5)})
    suspended = instance("suspended-1", 1, "cuda:0").model_copy(update={"load": EngineLoad()})
    assert find_uncounted(status({"cuda:0": 0}, earlier, counted, suspended)) == {("old", "cuda")}
