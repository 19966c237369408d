"""Models that are built from the modules of another one of their architecture."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers as tf

from services.engine.generation import attention
from services.engine.generation.runner import PackedRunner, Row
from services.engine.model import checkpoint
from services.engine.model.architectures import ModelCache
from services.engine.model.segment import Segment
from tests.integration.engine.model_families import CONFIGS, running
from tests.support.segments import WrittenSegment, card_of


@pytest.fixture
def segments() -> Iterator[list[WrittenSegment]]:
    found: list[WrittenSegment] = []
    yield found
    for segment in found:
        segment.unlink()


def save(name: str, directory: Path, seed: int) -> Path:
    torch.manual_seed(seed)
    model = tf.AutoModelForCausalLM.from_config(copy.deepcopy(CONFIGS[name]), dtype=torch.float32)
    model.generation_config = tf.GenerationConfig()
    model.save_pretrained(directory)
    return directory


def logits(model: tf.PreTrainedModel) -> torch.Tensor:
    runner = PackedRunner(model, torch.device("cpu"), 64)
    return runner.forward([Row(runner.new_state(), 0, (5, 6, 7, 8))])


@pytest.mark.parametrize("name", running(["llama", "llama-tied", "qwen3", "gpt2", "gpt-neox", "opt", "phi3"]))
def test_second_model_of_an_architecture_computes_what_one_built_by_transformers_computes(
    name: str, tmp_path: Path, segments: list[WrittenSegment]
) -> None:
    attention.register()
    cache = ModelCache()
    made: list[tf.PreTrainedModel] = []
    expected: list[torch.Tensor] = []
    for seed in (1, 2):
        directory = save(name, tmp_path / f"{seed}", seed)
        card = card_of(directory)
        config = cache.config(directory, card)
        kind = checkpoint.model_class(config, card, directory)
        segments.append(WrittenSegment(directory).write())
        segment = Segment(segments[-1].name)
        model, architecture = cache.bind(kind, config, segment, torch.float32, card, is_packed=True)
        assert architecture is not None
        assert architecture.skeleton is not None
        made.append(model)
        plain = checkpoint.bind(kind, checkpoint.read_config(directory, card), segment.tensors(), torch.float32, is_packed=True)
        expected.append(logits(plain))
        assert not checkpoint.copied_parameters(model, segment)
    assert torch.equal(logits(made[1]), expected[1])
    assert torch.equal(logits(made[0]), expected[0]), "the first one is unchanged"
    assert not torch.equal(expected[0], expected[1])
    assert made[0].config is not made[1].config


def test_tokenizer_is_read_once_for_equal_files(demo_directory: Path, tmp_path: Path) -> None:
    cache = ModelCache()
    first = cache.tokenization(demo_directory, trust_remote_code=False)
    shutil.copytree(demo_directory, tmp_path / "copy")
    assert cache.tokenization(tmp_path / "copy", trust_remote_code=False) is first
    assert cache.tokenization(demo_directory, trust_remote_code=True) is not first
    (tmp_path / "copy" / "chat_template.jinja").write_text("{{ messages }}")
    assert cache.tokenization(tmp_path / "copy", trust_remote_code=False) is not first
