"""Each layer of each packable family waits for its own weights, and for no later ones."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from services.engine.generation.runner import Row, Runner
from services.engine.model import loading
from services.engine.model.arriving import ArrivingWeights, ByteSpan
from services.engine.model.checkpoint import PACKABLE
from services.engine.settings import EngineSettings
from shared.contracts.engine import EngineStart
from shared.errors import CheckpointInvalid
from tests.integration.engine.test_families import CONFIGS, CONVERTED, save
from tests.support.segments import WrittenSegment, card_of
from weights.formats.execution_order import execution_rank

PROMPT = [7, 8, 9, 10, 11]
FAMILIES = [name for name in CONFIGS if CONFIGS[name].model_type in PACKABLE and name not in (*CONVERTED, "llama-dynamic-rope")]


class OnDemand(ArrivingWeights):
    """Weights of which a byte arrives only when a layer waits for it."""

    def __init__(self, segment: WrittenSegment, directory: Path) -> None:
        super().__init__()
        complete = WrittenSegment(directory).write()
        self._bytes = complete.path.read_bytes()
        complete.unlink()
        self._path = segment.path
        self.waits: list[Sequence[ByteSpan]] = []

    def wait(self, spans: Sequence[ByteSpan]) -> None:
        self.waits.append(spans)
        with self._path.open("r+b") as file:
            for start, end in spans:
                file.seek(start)
                file.write(self._bytes[start:end])
        self.mark_arrived(spans)
        super().wait(spans)


def logits(runner: Runner | None) -> torch.Tensor:
    assert runner is not None
    return runner.forward([Row(runner.new_state(), 0, PROMPT)])


@pytest.mark.parametrize("name", FAMILIES)
def test_layers_wait_for_their_weights_in_the_order_of_loading(name: str, tmp_path: Path, demo_directory: Path) -> None:
    directory = save(name, tmp_path / "m", demo_directory, torch.float32)
    start = EngineStart(instance_id="i", node="n", card=card_of(directory), device="cpu:0", kv_bytes=64 << 20, log_path="unused")
    files, settings = loading.read_files(directory, start), EngineSettings()
    segment = WrittenSegment(directory)
    segment.write_index()
    try:
        bound = loading.bind_model(directory, segment.attached(), start)
        assert loading.can_overlap(bound, start)
        weights = OnDemand(segment, directory)
        early, gates = loading.begin(bound, files, start, settings, weights, None)
        found = logits(early.runner)
        gates.remove()
        waits = len(weights.waits)
        torch.testing.assert_close(logits(early.runner), found, rtol=0, atol=0)
        assert len(weights.waits) == waits
        whole = loading.complete(bound, files, start, settings)
        assert early.block_bytes == whole.block_bytes
        torch.testing.assert_close(logits(whole.runner), found, rtol=0, atol=0)
        assert_in_order(segment, weights.waits)
    finally:
        segment.unlink()


def assert_in_order(segment: WrittenSegment, waits: list[Sequence[ByteSpan]]) -> None:
    """No layer waits for a tensor that is loaded after all those of a layer that computes later."""
    tensors = {t.offset: t.name for t in segment.index.tensors}
    stages = [sorted({execution_rank(tensors[start])[:2] for start, _ in spans}) for spans in waits]
    assert all(len(stage) == 1 for stage in stages)
    seen = [stage[0] for stage in stages if stage[0][0] > 0]  # embeddings tied to the head are first
    firsts = list(dict.fromkeys(seen))
    assert firsts == sorted(firsts)


def test_a_failed_load_ends_the_step_with_its_error(tmp_path: Path, demo_directory: Path) -> None:
    directory = save("llama", tmp_path / "m", demo_directory, torch.float32)
    start = EngineStart(instance_id="i", node="n", card=card_of(directory), device="cpu:0", kv_bytes=64 << 20, log_path="unused")
    segment = WrittenSegment(directory)
    segment.write_index()
    try:
        bound = loading.bind_model(directory, segment.attached(), start)
        weights = ArrivingWeights()
        early, _ = loading.begin(bound, loading.read_files(directory, start), start, EngineSettings(), weights, None)
        weights.fail(CheckpointInvalid("the file shrank"))
        with pytest.raises(CheckpointInvalid, match="the file shrank"):
            logits(early.runner)
    finally:
        segment.unlink()
