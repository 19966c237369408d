"""The cost of usage at the mesh's prices."""

from __future__ import annotations

from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from shared.contracts.prices import Cost, Prices

PRICES = Prices.model_validate(
    {
        "currency": "EUR",
        "tokens": {"prompt": 0.1, "cached": 0.02, "completion": 0.4},
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


USES = st.lists(st.tuples(st.integers(0, 10**9), st.integers(0, 10**9), st.integers(0, 10**9)), max_size=20)


@given(USES)
def test_the_cost_of_a_sum_is_the_sum_of_the_costs(uses: list[tuple[int, int, int]]) -> None:
    uses = [(max(prompt, cached), cached, completion) for prompt, cached, completion in uses]
    apart = Cost()
    for use in uses:
        apart = apart.plus(PRICES.cost("m", use))
    together = PRICES.cost("m", (sum(u[0] for u in uses), sum(u[1] for u in uses), sum(u[2] for u in uses)))
    assert apart == together


@pytest.mark.parametrize("bad", [{"prompt": -1}, {"promt": 1}, {"prompt": "much"}])
def test_wrong_prices_are_refused(bad: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        Prices.model_validate({"currency": "EUR", "tokens": bad})
