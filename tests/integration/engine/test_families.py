"""Greedy output equals `model.generate` token for token, for each model family.

Sequences run alone and in any batch mix, on zero-copy weights.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers as tf
from safetensors.torch import load_file, save_file

from services.engine.domain.step_planning import BLOCK_TOKENS
from services.engine.model import loading
from services.engine.model.architectures import ModelCache
from services.engine.model.bound_model import bind_model
from services.engine.model.checkpoint import PACKABLE
from services.engine.model.model_files import read_files
from services.engine.settings import EngineSettings
from shared.contracts.engine import EngineStart
from tests.integration.engine.loaded_model import BF16_NEAR_TIE, PROMPTS, LoadedModel
from tests.integration.engine.model_families import CONFIGS, CONVERTED, VOCABULARY, running, save
from tests.support.segments import WrittenSegment, card_of

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("name", running(CONFIGS))
def test_float32_output_equals_generate_alone_and_in_any_batch(name: str, tmp_path: Path, demo_directory: Path) -> None:
    loaded = LoadedModel(save(name, tmp_path / "m", demo_directory, torch.float32), "float32")
    try:
        assert bool(loaded.bound.copied) == (name in CONVERTED)
        expected_packed = CONFIGS[name].model_type in PACKABLE and name != "llama-dynamic-rope"
        assert loaded.bound.is_packed == expected_packed
        expected = [loaded.generated(p) for p in PROMPTS]
        for i, prompt in enumerate(PROMPTS):
            assert loaded.run([loaded.request(i, prompt)])[f"r{i}"][0] == expected[i], f"alone, prompt {i}"
        mixed = loaded.run([loaded.request(i, p) for i, p in enumerate(PROMPTS)])
        assert [mixed[f"r{i}"][0] for i in range(len(PROMPTS))] == expected
    finally:
        loaded.close()


@pytest.mark.parametrize(
    "name", running(["llama", "llama-tied", "qwen3", "mistral-window", "gemma", "gpt-neox", "gpt2", "opt", "bloom"])
)
def test_bfloat16_output_equals_generate_alone_and_differs_only_at_near_ties(
    name: str, tmp_path: Path, demo_directory: Path
) -> None:
    loaded = LoadedModel(save(name, tmp_path / "m", demo_directory, torch.bfloat16), "bfloat16")
    try:
        assert not loaded.bound.copied
        expected = [loaded.generated(p) for p in PROMPTS]
        for i, prompt in enumerate(PROMPTS):
            assert loaded.run([loaded.request(i, prompt)])[f"r{i}"][0] == expected[i], f"alone, prompt {i}"
        mixed = loaded.run([loaded.request(i, p) for i, p in enumerate(PROMPTS)])
        for i, prompt in enumerate(PROMPTS):
            assert_near_tie(loaded, prompt, expected[i], mixed[f"r{i}"][0])
    finally:
        loaded.close()


def assert_near_tie(loaded: LoadedModel, prompt: list[int], alone: list[int], mixed: list[int]) -> None:
    first = next((k for k, (a, b) in enumerate(zip(alone, mixed, strict=True)) if a != b), None)
    if first is None:
        return
    with torch.inference_mode():
        logits = loaded.reference(torch.tensor([prompt + alone[:first]])).logits[0, -1].float()
    gap = float(logits[alone[first]] - logits[mixed[first]]) / float(logits.std())
    assert abs(gap) <= BF16_NEAR_TIE


def test_preemption_does_not_change_the_output(tmp_path: Path, demo_directory: Path) -> None:
    """Preemption does not change output.

    Four sequences grow beyond a block each in a cache of five blocks: some are preempted and
    recomputed.
    """
    prompts = [list(range(10 * i + 3, 10 * i + 3 + BLOCK_TOKENS - 20)) for i in range(4)]
    loaded = LoadedModel(save("llama", tmp_path / "m", demo_directory, torch.float32), "float32", kv_blocks=5)
    try:
        mixed = loaded.run([loaded.request(i, p) for i, p in enumerate(prompts)])
        assert [mixed[f"r{i}"][0] for i in range(4)] == [loaded.generated(p) for p in prompts]
    finally:
        loaded.close()


def test_seeded_sampling_does_not_depend_on_the_batch(tmp_path: Path, demo_directory: Path) -> None:
    loaded = LoadedModel(save("llama", tmp_path / "m", demo_directory, torch.float32), "float32")
    try:
        sampled = {"temperature": 1.0, "top_p": 0.95, "seed": 11, "n": 2, "presence_penalty": 0.5}
        alone = loaded.run([loaded.request(0, PROMPTS[0], **sampled)])["r0"]
        mixed = loaded.run(
            [loaded.request(9, PROMPTS[1]), loaded.request(0, PROMPTS[0], **sampled), loaded.request(8, PROMPTS[3])]
        )["r0"]
        assert alone == mixed
        assert alone[0] != alone[1]
        assert alone != loaded.run([loaded.request(0, PROMPTS[0], **{**sampled, "seed": 12})])["r0"]
    finally:
        loaded.close()


def test_a_gpt2_checkpoint_of_the_bare_model(tmp_path: Path, demo_directory: Path) -> None:
    """The original GPT-2 files name their tensors without the `transformer.` prefix."""
    directory = save("gpt2", tmp_path / "m", demo_directory, torch.float32)
    weights = {k.removeprefix("transformer."): v for k, v in load_file(directory / "model.safetensors").items()}
    save_file(weights, directory / "model.safetensors", {"format": "pt"})
    loaded = LoadedModel(directory, "float32")
    try:
        assert not loaded.bound.copied
        assert loaded.run([loaded.request(0, PROMPTS[0])])["r0"][0] == loaded.generated(PROMPTS[0])
    finally:
        loaded.close()


def test_another_dtype_is_converted(tmp_path: Path, demo_directory: Path) -> None:
    directory = save("llama", tmp_path / "m", demo_directory, torch.float32)
    card = card_of(directory, dtype="bfloat16")
    segment = WrittenSegment(directory)
    segment.write_index()
    try:
        start = EngineStart(instance_id="i", node="n", card=card, device="cpu:0", kv_bytes=64 << 20, log_path="unused")
        bound = bind_model(directory, segment.attached(), start, ModelCache())
        segment.write_data()
        loading.complete(bound, read_files(directory, start, ModelCache()), start, EngineSettings())
        wanted = load_file(directory / "model.safetensors")["lm_head.weight"].bfloat16()
        assert torch.equal(bound.model.get_output_embeddings().weight, wanted)
    finally:
        segment.unlink()


@pytest.mark.parametrize("mode", ["mean", "cls", "lasttoken", None])
def test_encoders_embed_as_sentence_transformers_do(mode: str | None, tmp_path: Path, demo_directory: Path) -> None:
    torch.manual_seed(0)
    model = tf.BertModel(
        tf.BertConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=64,
            initializer_range=0.3,
        )
    ).eval()
    model.save_pretrained(tmp_path)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demo_directory / file, tmp_path / file)
    if mode is not None:
        modules = [{"path": "", "type": "sentence_transformers.models.Transformer"}]
        modules += [
            {"path": f"{i}_{k}", "type": f"sentence_transformers.models.{k}"} for i, k in ((1, "Pooling"), (2, "Normalize"))
        ]
        (tmp_path / "modules.json").write_text(json.dumps(modules))
        (tmp_path / "1_Pooling").mkdir()
        flag = {"mean": "mean_tokens", "cls": "cls_token", "lasttoken": "lasttoken"}[mode]
        (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps({f"pooling_mode_{flag}": True}))
    segment = WrittenSegment(tmp_path).write()
    try:
        card = card_of(tmp_path, task="embed")
        start = EngineStart(instance_id="i", node="n", card=card, device="cpu:0", kv_bytes=0, log_path="unused")
        bound = bind_model(tmp_path, segment.attached(), start, ModelCache())
        assert not bound.copied
        computable = loading.complete(bound, read_files(tmp_path, start, ModelCache()), start, EngineSettings())
        inputs = [[5, 6, 7, 8, 9, 10], [11, 12, 13]]
        vectors = computable.embedder.embed(inputs, None)
        for ids, vector in zip(inputs, vectors, strict=True):
            with torch.inference_mode():
                hidden = model(torch.tensor([ids])).last_hidden_state[0]
            wanted = {"mean": hidden.mean(0), None: hidden.mean(0), "cls": hidden[0], "lasttoken": hidden[-1]}[mode]
            torch.testing.assert_close(vector, torch.nn.functional.normalize(wanted, dim=0), atol=1e-5, rtol=1e-4)
        short = computable.embedder.embed(inputs, 8)
        torch.testing.assert_close(short, torch.nn.functional.normalize(vectors[:, :8], dim=-1))
    finally:
        segment.unlink()
