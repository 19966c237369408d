"""Shares of the examples of property tests."""

from __future__ import annotations

import pytest

from tests.support import examples as module
from tests.support.examples import examples


@pytest.mark.parametrize(("percent", "full", "expected"), [(30, 200, 60), (30, 20, 10), (30, 5, 5), (100, 200, 200), (100, 5, 5)])
def test_a_share_of_the_examples_but_at_least_ten(percent: int, full: int, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PERCENT", percent)
    assert examples(full) == expected
