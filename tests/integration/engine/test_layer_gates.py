"""Each layer of each tested family waits for its own weights, and for no later ones."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import transformers as tf

from services.engine.generation.runner import Row, Runner
from services.engine.model import conversion, loading
from services.engine.model.architectures import ModelCache
from services.engine.model.arriving import ArrivingWeights, ByteSpan
from services.engine.model.bound_model import bind_model
from services.engine.model.checkpoint import EMBEDDING, PACKABLE
from services.engine.model.model_files import read_files
from services.engine.settings import EngineSettings
from shared.contracts.engine import EngineStart
from shared.errors import CheckpointInvalid
from tests.integration.engine.model_families import CONFIGS, CONVERTED, save
from tests.support.segments import WrittenSegment, card_of
from weights.formats.execution_order import execution_rank

PROMPT = [7, 8, 9, 10, 11]
FAMILIES = [name for name in CONFIGS if CONFIGS[name].model_type in PACKABLE and name != "llama-dynamic-rope"]
_SMALL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": 1024,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "pad_token_id": 0,
}
_DECODER = {**_SMALL, "num_key_value_heads": 2, "bos_token_id": None, "eos_token_id": None}
ENCODERS: dict[str, tf.PreTrainedConfig] = {
    "bert": tf.BertConfig(**_SMALL),
    "distilbert": tf.DistilBertConfig(
        dim=32, hidden_dim=64, n_layers=3, n_heads=4, vocab_size=1024, max_position_embeddings=64, initializer_range=0.3
    ),
    "llama": tf.LlamaConfig(**_DECODER),
    "mistral": tf.MistralConfig(**_DECODER, head_dim=16),
    "modernbert": tf.ModernBertConfig(**_SMALL, bos_token_id=1, cls_token_id=1, eos_token_id=2, sep_token_id=2),
    "mpnet": tf.MPNetConfig(**_SMALL),
    "qwen2": tf.Qwen2Config(**_DECODER),
    "qwen3": tf.Qwen3Config(**_DECODER, head_dim=16),
    "roberta": tf.RobertaConfig(**_SMALL),
    "xlm-roberta": tf.XLMRobertaConfig(**_SMALL),
}


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
    files, settings = read_files(directory, start, ModelCache()), EngineSettings()
    segment = WrittenSegment(directory)
    segment.write_index()
    try:
        bound = bind_model(directory, segment.attached(), start, ModelCache())
        assert bool(bound.copied) == (name in CONVERTED)
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


@pytest.mark.parametrize("name", ENCODERS)
def test_layers_of_embedding_models_wait_for_their_weights(name: str, tmp_path: Path, demo_directory: Path) -> None:
    assert ENCODERS.keys() == EMBEDDING
    torch.manual_seed(0)
    tf.AutoModel.from_config(ENCODERS[name], dtype=torch.float32).save_pretrained(tmp_path)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demo_directory / file, tmp_path / file)
    start = EngineStart(
        instance_id="i", node="n", card=card_of(tmp_path, task="embed"), device="cpu:0", kv_bytes=0, log_path="unused"
    )
    files, settings = read_files(tmp_path, start, ModelCache()), EngineSettings()
    segment = WrittenSegment(tmp_path)
    segment.write_index()
    inputs = [PROMPT, [12, 13]]
    try:
        bound = bind_model(tmp_path, segment.attached(), start, ModelCache())
        assert loading.can_overlap(bound, start)
        weights = OnDemand(segment, tmp_path)
        early, gates = loading.begin(bound, files, start, settings, weights, None)
        assert weights.waits == []
        found = early.embedder.embed(inputs, None)
        waited = {span for spans in weights.waits for span in spans}
        unread = {t.name for t in segment.index.tensors if (t.offset, t.offset + t.nbytes) not in waited}
        assert all("pooler" in tensor for tensor in unread)
        gates.remove()
        segment.write_data()
        whole = loading.complete(bound, files, start, settings)
        torch.testing.assert_close(whole.embedder.embed(inputs, None), found, rtol=0, atol=0)
    finally:
        segment.unlink()


@pytest.mark.parametrize("name", ["llama", "llama-tied", "mixtral", "gpt2"])
def test_weights_of_another_type_are_converted_as_they_arrive(name: str, tmp_path: Path, demo_directory: Path) -> None:
    directory = save(name, tmp_path / "m", demo_directory, torch.float32)
    card = card_of(directory, dtype="bfloat16")
    start = EngineStart(instance_id="i", node="n", card=card, device="cpu:0", kv_bytes=64 << 20, log_path="unused")
    files, settings = read_files(directory, start, ModelCache()), EngineSettings()
    segment = WrittenSegment(directory)
    segment.write_index()
    try:
        bound = bind_model(directory, segment.attached(), start, ModelCache())
        assert bound.copied
        assert loading.can_overlap(bound, start)
        weights = OnDemand(segment, directory)
        early, gates = loading.begin(bound, files, start, settings, weights, None)
        found = logits(early.runner)
        gates.remove()
        tied = early.model.get_output_embeddings().weight is early.model.get_input_embeddings().weight
        assert tied == (name in ("llama-tied", "gpt2"))
        segment.write_data()
        whole = loading.complete(bound, files, start, settings)
        assert whole.model is not early.model
        torch.testing.assert_close(logits(whole.runner), found, rtol=0, atol=0)
        torch.testing.assert_close(logits(early.runner), found, rtol=0, atol=0)
        assert_in_order(segment, weights.waits)
    finally:
        segment.unlink()


def test_parameters_that_no_step_has_read_are_converted_at_the_end(tmp_path: Path, demo_directory: Path) -> None:
    directory = save("qwen3-moe", tmp_path / "m", demo_directory, torch.float32)
    start = EngineStart(instance_id="i", node="n", card=card_of(directory), device="cpu:0", kv_bytes=64 << 20, log_path="unused")
    files, settings = read_files(directory, start, ModelCache()), EngineSettings()
    segment = WrittenSegment(directory)
    segment.write_index()
    try:
        bound = bind_model(directory, segment.attached(), start, ModelCache())
        early, gates = loading.begin(bound, files, start, settings, ArrivingWeights(), None)
        segment.write_data()
        gates.remove()
        found = logits(early.runner)
        torch.testing.assert_close(logits(loading.complete(bound, files, start, settings).runner), found, rtol=0, atol=0)
    finally:
        segment.unlink()


def test_a_model_whose_sources_are_unknown_waits_for_the_whole_load(
    tmp_path: Path, demo_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = save("mixtral", tmp_path / "m", demo_directory, torch.float32)
    start = EngineStart(instance_id="i", node="n", card=card_of(directory), device="cpu:0", kv_bytes=64 << 20, log_path="unused")
    monkeypatch.setattr(conversion, "rename_source_key", lambda name, *_: (name, None))
    segment = WrittenSegment(directory).write()
    try:
        bound = bind_model(directory, segment.attached(), start, ModelCache())
        assert bound.late is not None
        monkeypatch.setattr(bound.late, "_sources", {"model.layers.0.": []})
        assert not loading.can_overlap(bound, start)
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
        bound = bind_model(directory, segment.attached(), start, ModelCache())
        weights = ArrivingWeights()
        early, _ = loading.begin(bound, read_files(directory, start, ModelCache()), start, EngineSettings(), weights, None)
        weights.fail(CheckpointInvalid("the file shrank"))
        with pytest.raises(CheckpointInvalid, match="the file shrank"):
            logits(early.runner)
    finally:
        segment.unlink()
