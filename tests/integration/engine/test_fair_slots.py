"""A batcher gives its slots to the keys by fair shares, and paused sequences lose no token."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from services.engine.generation.request import GenerationRequest
from services.engine.generation.runner import Row, Runner
from shared.contracts.inference import FairShare
from tests.integration.engine.loaded_model import TOKENS, LoadedModel
from tests.integration.engine.recorded_batcher import HeldBatcher, flat

BLOCKS_OF_ONE = 2


@pytest.fixture(scope="module")
def loaded(demo_directory: Path) -> Iterator[LoadedModel]:
    loaded = LoadedModel(demo_directory, "float32")
    yield loaded
    loaded.close()


class CountedRunner:
    """Counts the tokens that it computes."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.rewinds = runner.rewinds
        self.tokens = 0

    def new_state(self) -> object:
        return self._runner.new_state()

    def forget(self, adapter: object) -> None:
        raise AssertionError("no adapter is used")

    def forward(self, rows: Sequence[Row]) -> torch.Tensor:
        self.tokens += sum(len(row.tokens) for row in rows)
        return self._runner.forward(rows)


def _of(flow: str, request: GenerationRequest, priority: int = 0) -> GenerationRequest:
    return dataclasses.replace(request, share=FairShare(flow=flow, priority=priority))


@pytest.mark.parametrize(("kv_blocks", "keeps_memory"), [(100, True), (2 * BLOCKS_OF_ONE + 1, False)])
def test_a_key_that_arrives_late_is_served_before_a_flood(loaded: LoadedModel, kv_blocks: int, keeps_memory: bool) -> None:
    flood = [loaded.request(i, list(range(10 + i, 140 + i)), max_tokens=TOKENS) for i in range(6)]
    late = [loaded.request(10 + i, list(range(30 + i, 160 + i)), max_tokens=TOKENS) for i in range(2)]
    expected = {r: choices[0] for r, choices in loaded.run([*flood, *late]).items()}
    small = LoadedModel.__new__(LoadedModel)
    small.__dict__ = loaded.__dict__ | {"limits": dataclasses.replace(loaded.limits, max_sequences=2, kv_blocks=kv_blocks)}
    assert loaded.computable.runner is not None
    runner = CountedRunner(loaded.computable.runner)
    reported = HeldBatcher(small, runner)
    try:
        reported.hold_at(3)
        for request in flood:
            reported.batcher.submit(_of("flood", request))
        reported.until(lambda: len(reported.deltas.get("r0", {}).get(0, ())) >= 3)
        for request in late:
            reported.batcher.submit(_of("late", request))
        reported.release()
        reported.until(lambda: len(reported.over) == 8)
    finally:
        reported.close()
    ends = [event.request_id for event in reported.ends]
    assert set(ends[:2]) == {"r10", "r11"}
    assert {r: flat(found[0])[1] for r, found in reported.deltas.items()} == expected
    each = 130 + TOKENS - 1
    if keeps_memory:
        assert runner.tokens == 8 * each, "a paused sequence was computed again"
    else:
        assert runner.tokens > 8 * each
