"""Commands to a batcher that has stopped, or stops before it applies them."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any, cast

import pytest

from services.engine.domain.step_planning import Limits
from services.engine.generation.batcher import Batcher
from services.engine.generation.embedding import Embedder
from services.engine.generation.prepared_prefixes import Outcome, PrepareOrder
from services.engine.tokenization import Tokenization
from shared.errors import ShuttingDown

LIMITS = Limits(max_sequences=1, kv_blocks=8, step_tokens=8, chunk_tokens=8)


class Asked:
    """One command of each kind that is answered."""

    def __init__(self, batcher: Batcher) -> None:
        self.outcomes: list[Outcome] = []
        self.done: list[str] = []
        self.transferred: Future[int] = batcher.transfer(lambda _: 1)
        batcher.prepare(PrepareOrder("p", ((1, 2),), None, "", 60.0, 60.0, self.outcomes.append))
        batcher.forget(cast(Any, object()), lambda: self.done.append("forgotten"))
        batcher.warm_up(lambda: self.done.append("warm"))

    def are_answered(self) -> bool:
        assert isinstance(self.transferred.exception(timeout=0), ShuttingDown)
        assert [type(outcome) for outcome in self.outcomes] == [ShuttingDown]
        return self.done == ["forgotten", "warm"]


@pytest.fixture
def batcher() -> Batcher:
    return Batcher(None, cast(Embedder, None), cast(Tokenization, None), LIMITS, lambda _: None)


def test_commands_behind_a_stop_and_after_it_are_answered(batcher: Batcher) -> None:
    batcher.stop()
    behind = Asked(batcher)
    assert not batcher.step()
    assert behind.are_answered()
    assert Asked(batcher).are_answered(), "at once: no step follows"
    assert not batcher.has_commands()


def test_order_in_progress_fails_when_the_batcher_stops(batcher: Batcher) -> None:
    outcomes: list[Outcome] = []
    batcher.prepare(PrepareOrder("p", ((1, 2),), None, "", 60.0, 60.0, outcomes.append))
    assert batcher.step()
    assert not outcomes
    batcher.stop()
    assert not batcher.step()
    assert [type(outcome) for outcome in outcomes] == [ShuttingDown]


def test_commands_are_answered_if_a_step_fails(batcher: Batcher) -> None:
    def fail() -> None:
        raise OSError("the device is lost")

    batcher.forget(cast(Any, object()), fail)
    behind = Asked(batcher)
    with pytest.raises(OSError, match="lost"):
        batcher.step()
    assert behind.are_answered()
