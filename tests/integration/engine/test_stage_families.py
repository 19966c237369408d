"""The stages of a model compute what the whole model computes, for each model family."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf

from services.engine.generation.kv_cache import SequenceKV, Slice
from services.engine.generation.runner import PackedRunner, Row
from services.engine.model import checkpoint
from services.engine.model.architectures import ModelCache
from services.engine.model.bound_model import bind_model
from services.engine.model.stage_model import bind_part
from services.engine.stages.part import StagePart
from shared.contracts.engine import EngineStart
from shared.contracts.stages import STAGEABLE, split_layers
from shared.errors import UnsupportedArchitecture
from tests.integration.engine.model_families import CONFIGS, running
from tests.support.segments import WrittenSegment, card_of

PROMPTS = [[7, 8, 9, 10, 11], list(range(20, 50)), [5]]
FAMILIES = sorted(name for name, config in CONFIGS.items() if config.model_type in STAGEABLE and "dynamic" not in name)


def write(directory: Path, config: Any) -> Path:
    torch.manual_seed(3)
    model = tf.AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=torch.float32)
    model.save_pretrained(directory)
    return directory


def test_every_stageable_type_is_tested() -> None:
    assert {CONFIGS[name].model_type for name in FAMILIES} == STAGEABLE


@pytest.mark.parametrize("family", running(FAMILIES))
def test_stages_compute_what_the_whole_model_does(family: str, tmp_path: Path) -> None:
    directory = write(tmp_path, CONFIGS[family])
    segment = WrittenSegment(directory).write()
    try:
        card = card_of(directory)
        start = EngineStart(instance_id="i", node="n", card=card, device="cpu:0", kv_bytes=1, log_path="unused")
        bound = bind_model(directory, segment.attached(), start, ModelCache())
        whole = PackedRunner(bound.model, torch.device("cpu"))
        kind = checkpoint.model_class(bound.config, card, directory)
        ranges = split_layers(bound.config.num_hidden_layers, 2 if "opt" in family else 3)
        parts = [StagePart(bind_part(kind, bound.config, bound.segment, torch.float32, r), r, torch.device("cpu")) for r in ranges]
        own = [whole.new_state() for _ in PROMPTS]
        theirs = [[SequenceKV() for _ in PROMPTS] for _ in parts]
        new, starts = [list(p) for p in PROMPTS], [0] * len(PROMPTS)
        for step in range(5):
            rows = [Row(s, start, tokens) for s, start, tokens in zip(own, starts, new, strict=True)]
            expected = whole.forward(rows)
            passed: torch.Tensor | None = None
            for part, states in zip(parts, theirs, strict=True):
                slices = [Slice(s, start, len(tokens)) for s, start, tokens in zip(states, starts, new, strict=True)]
                if step > 2:
                    part.prepare(starts)
                    # Parts with embeddings or a norm may compute more than `PreparedStep` would.
                    assert part in (parts[0], parts[-1]) or part._next_step.is_prepared(starts)
                passed = part.compute(slices, [t for tokens in new for t in tokens], passed)
            assert passed is not None
            assert torch.equal(passed.float(), expected)
            starts = [start + len(tokens) for start, tokens in zip(starts, new, strict=True)]
            new = [[int(row.argmax())] for row in expected]
    finally:
        segment.unlink()


def test_a_part_binds_only_its_own_parameters(tmp_path: Path) -> None:
    directory = write(tmp_path, CONFIGS["llama-tied"])
    segment = WrittenSegment(directory).write()
    try:
        card = card_of(directory)
        start = EngineStart(instance_id="i", node="n", card=card, device="cpu:0", kv_bytes=1, log_path="unused")
        bound = bind_model(directory, segment.attached(), start, ModelCache())
        kind = checkpoint.model_class(bound.config, card, directory)
        names = [
            {n for n, _ in bind_part(kind, bound.config, bound.segment, torch.float32, r).named_parameters(remove_duplicate=False)}
            for r in split_layers(3, 3)
        ]
        assert {n for n in names[0] if ".layers." not in n} == {"model.embed_tokens.weight"}
        assert {n for n in names[1] if ".layers." not in n} == set()
        assert {n for n in names[2] if ".layers." not in n} == {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}
        for number, found in enumerate(names):
            assert {n.split(".")[2] for n in found if ".layers." in n} == {str(number)}
    finally:
        segment.unlink()


def test_untested_types_are_refused(tmp_path: Path) -> None:
    directory = write(tmp_path, CONFIGS["stablelm"])
    segment = WrittenSegment(directory).write()
    try:
        start = EngineStart(instance_id="i", node="n", card=card_of(directory), device="cpu:0", kv_bytes=1, log_path="unused")
        bound = bind_model(directory, segment.attached(), start, ModelCache())
        with pytest.raises(UnsupportedArchitecture, match="stablelm"):
            bind_part(type(bound.model), bound.config, bound.segment, torch.float32, split_layers(3, 3)[0])
    finally:
        segment.unlink()
