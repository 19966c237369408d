"""Steps that a stage has prepared compute what other steps do."""

from __future__ import annotations

import copy
from typing import Any, cast

import pytest
import torch
import transformers as tf

from services.engine.generation import attention
from services.engine.generation.kv_cache import SequenceKV, Slice
from services.engine.generation.runner import Row
from services.engine.model.stage_model import _prune
from services.engine.stages.connections import Frame
from services.engine.stages.first_stage import FirstStageRunner
from services.engine.stages.part import StagePart
from services.engine.stages.steps import StageSteps
from shared.contracts.stages import LayerRange, StageMessage, StageResult, StageRow, StageStep, split_layers

STAGES = 3
PROMPT = [7, 8, 9, 10, 11]
SHAPE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": STAGES,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "initializer_range": 0.3,
}


class Pipeline:
    """The stages of one sequence, and how often each has computed rotary embeddings."""

    def __init__(self, config: tf.PreTrainedConfig) -> None:
        attention.register()
        torch.manual_seed(3)
        model = tf.AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=attention.PACKED).eval()
        self.parts: list[StagePart] = []
        self.rotary = [0] * STAGES
        for index, layers in enumerate(split_layers(STAGES, STAGES)):
            own = copy.deepcopy(model)
            _prune(own, layers)
            own.model.rotary_emb.register_forward_hook(lambda *_, index=index: self._count(index))
            self.parts.append(StagePart(own, layers, torch.device("cpu")))
        self.states = [SequenceKV() for _ in self.parts]

    def _count(self, index: int) -> None:
        self.rotary[index] += 1

    def compute(self, start: int, tokens: list[int], states: list[SequenceKV] | None = None) -> torch.Tensor:
        """Return the logits after the last of these tokens."""
        passed: torch.Tensor | None = None
        for part, state in zip(self.parts, states or self.states, strict=True):
            passed = part.compute([Slice(state, start, len(tokens))], tokens, passed)
        assert passed is not None
        return passed

    def prepare(self, *positions: int) -> None:
        for part in self.parts:
            part.prepare(positions)
        self.rotary = [0] * STAGES


@pytest.fixture
def pipeline() -> Pipeline:
    return Pipeline(tf.LlamaConfig(**SHAPE))


@pytest.fixture
def expected() -> list[torch.Tensor]:
    """The logits of a prompt and of three tokens, without preparation."""
    pipeline = Pipeline(tf.LlamaConfig(**SHAPE))
    found = [pipeline.compute(0, PROMPT)]
    for start in range(len(PROMPT), len(PROMPT) + 3):
        found.append(pipeline.compute(start, [int(found[-1].argmax())]))
    return found


def test_a_prepared_step_computes_the_same_and_only_its_layers(pipeline: Pipeline, expected: list[torch.Tensor]) -> None:
    found = [pipeline.compute(0, PROMPT)]
    for start in range(len(PROMPT), len(PROMPT) + 3):
        pipeline.prepare(start)
        found.append(pipeline.compute(start, [int(found[-1].argmax())]))
        assert pipeline.rotary == [0] * STAGES
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_a_step_at_other_positions_is_computed_as_if_none_was_prepared(pipeline: Pipeline, expected: list[torch.Tensor]) -> None:
    pipeline.compute(0, PROMPT)
    pipeline.prepare(len(PROMPT) + 1)
    found = pipeline.compute(len(PROMPT), [int(expected[0].argmax())])
    assert pipeline.rotary == [1] * STAGES
    assert torch.equal(found, expected[1])
    found = pipeline.compute(len(PROMPT) + 1, [int(expected[1].argmax())])
    assert pipeline.rotary == [1] * STAGES, "it is prepared still"
    assert torch.equal(found, expected[2])


def test_several_tokens_at_a_prepared_position_are_no_prepared_step(pipeline: Pipeline, expected: list[torch.Tensor]) -> None:
    pipeline.prepare(0)
    assert torch.equal(pipeline.compute(0, PROMPT), expected[0])
    assert pipeline.rotary == [1] * STAGES


def test_a_preparation_is_of_positions_whatever_sequence_has_them(pipeline: Pipeline, expected: list[torch.Tensor]) -> None:
    pipeline.compute(0, PROMPT)
    others = [SequenceKV() for _ in pipeline.parts]
    pipeline.compute(0, PROMPT, others)
    pipeline.prepare(len(PROMPT))
    token = [int(expected[0].argmax())]
    for states in (others, pipeline.states):
        assert torch.equal(pipeline.compute(len(PROMPT), token, states), expected[1])
    assert pipeline.rotary == [0] * STAGES


def test_steps_do_without_a_preparation_that_fails(
    pipeline: Pipeline, expected: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline.compute(0, PROMPT)

    def fail(*_: Any, **__: Any) -> None:
        raise IndexError("no such position")

    for part in pipeline.parts:
        monkeypatch.setattr(part._model.model.rotary_emb, "forward", fail)
    pipeline.prepare(len(PROMPT))
    monkeypatch.undo()
    assert torch.equal(pipeline.compute(len(PROMPT), [int(expected[0].argmax())]), expected[1])


def test_a_stage_whose_embeddings_are_scaled_computes_each_step_whole() -> None:
    """The other stages prepare their steps."""
    config = tf.GraniteConfig(**SHAPE, embedding_multiplier=3.0, logits_scaling=2.0)
    usual, pipeline = Pipeline(config), Pipeline(config)
    tokens = [int(usual.compute(0, PROMPT).argmax())]
    pipeline.compute(0, PROMPT)
    pipeline.prepare(len(PROMPT))
    assert torch.equal(pipeline.compute(len(PROMPT), tokens), usual.compute(len(PROMPT), tokens))
    assert pipeline.rotary == [1, 0, 0]


class RecordingPart:
    """A part whose hidden states have one value. It records the positions to prepare."""

    def __init__(self, layers: LayerRange) -> None:
        self.layers, self.device, self.dtype = layers, torch.device("cpu"), torch.float32
        self.hidden_size = self.vocabulary = 1
        self.prepared: list[list[int]] = []

    def compute(self, slices: list[Slice], tokens: Any, hidden: torch.Tensor | None) -> torch.Tensor:
        return torch.zeros(sum(part.count for part in slices), 1)

    def prepare(self, positions: list[int]) -> None:
        self.prepared.append(positions)


class RecordingRing:
    """Both connections of a stage: frames to receive, and those that were sent."""

    def __init__(self, *frames: Frame) -> None:
        self.frames = list(frames)
        self.sent: list[Frame] = []

    @property
    def has_frame(self) -> bool:
        return bool(self.frames)

    def get(self, timeout_s: float) -> Frame:
        return self.frames.pop(0)

    def put(self, frame: Frame) -> None:
        self.sent.append(frame)

    def put_small(self, message: StageMessage) -> None:
        self.sent.append(Frame(message))


def step_of(number: int, *rows: tuple[int, int]) -> Frame:
    """Return a step with these starts and counts, of one sequence each."""
    parts = tuple(StageRow(sequence=i, start=start, count=count) for i, (start, count) in enumerate(rows))
    return Frame(StageStep(number=number, rows=parts), bytearray(4 * sum(count for _, count in rows)))


def test_a_later_stage_prepares_the_positions_after_its_last_waiting_step() -> None:
    part, context = RecordingPart(split_layers(3, 3)[1]), 9
    ring: Any = RecordingRing(step_of(0, (0, 5), (0, 2)), step_of(1, (5, 1), (2, 1)))
    steps = StageSteps(cast(StagePart, part), ring, ring, 1, context, lambda: None)
    steps.step()
    assert part.prepared == [], "a frame waits"
    steps.step()
    assert part.prepared == [[6, 3]]
    assert len(ring.sent) == 2
    ring.frames.append(step_of(2, (6, 3)))
    steps.step()
    assert part.prepared == [[6, 3]], "the context has no further position"


def test_the_first_stage_prepares_the_positions_after_each_step() -> None:
    part, context = RecordingPart(split_layers(3, 3)[0]), 9
    ring: Any = RecordingRing(*(Frame(StageResult(number=number), bytearray(4)) for number in range(3)))
    runner = FirstStageRunner(cast(StagePart, part), 3, context, 1.0)
    runner.connect(ring, ring)
    state = runner.new_state()
    runner.forward([Row(state, 0, [1, 2, 3])])
    runner.forward([Row(state, 3, [4])])
    runner.forward([Row(state, 4, [1, 2, 3, 4, 5])])
    assert part.prepared == [[3], [4]], "nothing beyond the context"
