"""Computing that a migration repeats is charged to its cause, not to the request."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from services.engine.generation.events import Progressed
from services.engine.generation.prepared_prefixes import Computed, Outcome, PrepareOrder
from shared.engines.background_seconds import OWN
from tests.integration.engine.loaded_model import LoadedModel
from tests.integration.engine.model_families import save
from tests.integration.engine.recorded_batcher import PROMPT, TOKENS, RecordedBatcher, cut, request

pytestmark = pytest.mark.usefixtures("one_thread")
PLAN = "p-1"


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory, demo_directory: Path) -> Iterator[LoadedModel]:
    loaded = LoadedModel(save("llama", tmp_path_factory.mktemp("causes") / "m", demo_directory, torch.float32), "float32")
    yield loaded
    loaded.close()


@pytest.fixture
def engine(loaded: LoadedModel) -> Iterator[RecordedBatcher]:
    engine = RecordedBatcher(loaded)
    yield engine
    engine.close()


def prepare(engine: RecordedBatcher, name: str, sequence: list[int], caused_by: str | None) -> int:
    done, outcomes = threading.Event(), list[Outcome]()

    def report(outcome: Outcome) -> None:
        outcomes.append(outcome)
        done.set()

    engine.batcher.prepare(PrepareOrder(name, (tuple(sequence),), None, "", 60.0, 60.0, report, caused_by=caused_by))
    assert done.wait(60)
    (outcome,) = outcomes
    assert isinstance(outcome, Computed)
    return outcome.tokens


def background(engine: RecordedBatcher, cause: str = OWN) -> float:
    """Return the seconds of a cause; `OWN` without an argument."""
    engine.batcher.transfer(lambda _: None).result(60)  # in a step after those before
    return engine.batcher.meters.background_s.get(cause, 0.0)


def charged(engine: RecordedBatcher, request_id: str) -> float:
    (end,) = (e for e in engine.ends if isinstance(e, Progressed) and e.request_id == request_id)
    return end.device_s


@pytest.mark.parametrize("cause", [PLAN, OWN])
def test_a_migrated_request_pays_for_new_tokens_only(loaded: LoadedModel, engine: RecordedBatcher, cause: str) -> None:
    """The destination has prepared a part, and computes the rest with the request."""
    first = request(loaded, "whole")
    whole = engine.answer(first)
    before, other = background(engine, cause), OWN if cause == PLAN else PLAN
    assert prepare(engine, "x", PROMPT[:10], cause) > 0
    prepared = background(engine, cause)
    assert prepared > before
    assert prepare(engine, "x", [*PROMPT, whole[0][0].token_ids[0]], None) > 0  # as the last round: of the same cause
    grown = background(engine, cause)
    assert grown > prepared
    again = request(loaded, "moved", cut(whole, {0: TOKENS - 1}, first, prepared="x"))
    engine.answer(again)
    assert background(engine, cause) > grown, "tokens that were generated meanwhile"
    in_all = charged(engine, "whole") + charged(engine, "moved") + background(engine, cause) + background(engine, other)
    assert in_all == pytest.approx(engine.batcher.meters.busy_s, rel=0.01)


def test_a_request_that_was_not_prepared_pays_for_its_recomputation(loaded: LoadedModel, engine: RecordedBatcher) -> None:
    first = request(loaded, "whole")
    whole = engine.answer(first)
    engine.answer(request(loaded, "again", cut(whole, {0: 20}, first)))
    in_all = charged(engine, "whole") + charged(engine, "again") + background(engine)
    assert in_all == pytest.approx(engine.batcher.meters.busy_s, rel=0.01)
