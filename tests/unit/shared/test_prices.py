"""The cost of usage at the mesh's prices."""

from __future__ import annotations

from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from shared.contracts.plans import PlanRecord
from shared.contracts.prices import GIB_HOUR, Cost, Prices
from shared.contracts.usage import Counts

PRICES = Prices.model_validate(
    {
        "currency": "EUR",
        "tokens": {"prompt": 0.1, "cached": 0.02, "completion": 0.4},
        "compute_seconds": {"cuda": 3, "cpu": 0.5},
        "device_seconds": {"cuda": 0.5},
        "models": {"big": {"prompt": 1}, "*-mini": {"completion": 0.05}},
    }
)


def test_tokens_cost_what_the_model_or_the_mesh_asks() -> None:
    assert PRICES.cost("any", (1_000_000, 500_000, 1_000_000)).total == Decimal("0.05") + Decimal("0.01") + Decimal("0.4")
    assert PRICES.cost("big", (1_000_000, 1_000_000, 0)).total == 1  # the mesh's price of cached tokens is of cheaper prompts
    assert PRICES.cost("phi-mini", (0, 0, 1_000_000)) == Cost(completion=Decimal("0.05"), total=Decimal("0.05"))


def test_seconds_of_a_kind_of_device_without_a_price_are_free() -> None:
    assert PRICES.cost("m", (0, 0, 0), {"cuda": 1.5, "cpu": 100.0, "": 3.0}).cold_starts == Decimal("0.75")
    assert PRICES.cost("m", (0, 0, 0), clearing_s={"cuda": 1.5}).total == 0
    cost = PRICES.model_copy(update={"clearing_seconds": {"cuda": Decimal(2)}}).cost(
        "m", (0, 0, 0), clearing_s={"cuda": 1.5, "cpu": 1.0}
    )
    assert cost.clearing == cost.total == 3
    assert "clearing_seconds" not in PRICES.model_dump(), "gateways of version 0.1 refuse it"


def test_computing_costs_by_the_kind_of_its_devices() -> None:
    cost = PRICES.cost("m", (0, 0, 0), compute_us={"cuda": 1, "cpu": 2_000_000, "": 5})
    assert (cost.compute, cost.total) == (Decimal("1.000003"), Decimal("1.000003"))


@pytest.mark.parametrize("model", ["any", "big", "phi-mini"])
@pytest.mark.parametrize("compute_us", [{}, {"": 0}, {"cuda": 1_500_000}, {"cpu": 7}])
def test_a_request_costs_the_total_of_what_it_used(model: str, compute_us: dict[str, int]) -> None:
    for tokens in ((1_000, 400, 30), (10, 20, 0), (0, 0, 0)):
        cost = PRICES.request_cost(PRICES.of_model(model), tokens, compute_us)
        assert cost == PRICES.cost(model, tokens, compute_us=compute_us).total


AMOUNT = st.integers(0, 10**9)
USES = st.lists(st.tuples(AMOUNT, AMOUNT, AMOUNT, AMOUNT), max_size=20)


@given(USES)
def test_the_cost_of_a_sum_is_the_sum_of_the_costs(uses: list[tuple[int, int, int, int]]) -> None:
    uses = [(max(prompt, cached), cached, completion, us) for prompt, cached, completion, us in uses]
    apart = Cost()
    for *tokens, us in uses:
        apart = apart.plus(PRICES.cost("m", (tokens[0], tokens[1], tokens[2]), compute_us={"cuda": us}))
    prompt, cached, completion, us = (sum(use[i] for use in uses) for i in range(4))
    together = PRICES.cost("m", (prompt, cached, completion), compute_us={"cuda": us})
    assert apart == together


@pytest.mark.parametrize("bad", [{"prompt": -1}, {"promt": 1}, {"prompt": "much"}])
def test_wrong_prices_are_refused(bad: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        Prices.model_validate({"currency": "EUR", "tokens": bad})


def test_messages_of_version_01_have_no_victims_and_no_clearing() -> None:
    counts = Counts.model_validate({"requests": 1, "cold_start_s": 2.0})
    assert (counts.victims, counts.clearing_s, counts.clearing_device_s, counts.restart_s) == (0, 0, 0, 0)
    assert Cost.model_validate({"prompt": "1", "total": "1"}).clearing == 0
    plan = PlanRecord.model_validate({"plan_id": "p", "model": "m", "created": 0, "trigger": "demand", "way": "load"})
    assert (plan.preempted, plan.caused_by) == (None, None)


def test_cached_weights_have_a_price_and_a_cost_of_their_own() -> None:
    prices = Prices(currency="EUR", gib_hours={"host": Decimal(2), "cache": Decimal("0.5")})
    cost = prices.cost("m", (0, 0, 0), byte_s={"host": 3 * GIB_HOUR, "cache": 4 * GIB_HOUR})
    assert [cost.memory, cost.cache, cost.total] == [6, 2, 8]
    free = Prices(currency="EUR", gib_hours={"host": Decimal(2)})
    assert free.cost("m", (0, 0, 0), byte_s={"cache": 4 * GIB_HOUR}).total == 0
