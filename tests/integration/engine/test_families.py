"""Greedy output equals `model.generate` token for token, for each model family.

Sequences run alone and in any batch mix, on zero-copy weights.
"""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from safetensors.torch import load_file, save_file

from services.engine.domain.step_planning import BLOCK_TOKENS, Limits
from services.engine.generation.batcher import Batcher
from services.engine.generation.device_loop import DeviceLoop
from services.engine.generation.events import Broken, Event, Progressed
from services.engine.generation.request import GenerationRequest
from services.engine.model import loading
from services.engine.model.architectures import ModelCache
from services.engine.model.bound_model import BoundModel, bind_model
from services.engine.model.checkpoint import PACKABLE
from services.engine.model.model_files import ModelFiles, read_files
from services.engine.model.ready_model import ReadyModel
from services.engine.settings import EngineSettings
from shared.contracts.engine import EngineStart
from shared.contracts.inference import InferRequest
from tests.support.segments import WrittenSegment, card_of

pytestmark = pytest.mark.usefixtures("one_thread")

VOCABULARY = 1024
_SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
_NO_GROUPS = {k: v for k, v in _SMALL.items() if k != "num_key_value_heads"}
_ENDS: dict[str, Any] = {"vocab_size": VOCABULARY, "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}

CONFIGS: dict[str, Any] = {
    "llama": tf.LlamaConfig(**_SMALL),
    "llama-tied": tf.LlamaConfig(**_SMALL, tie_word_embeddings=True),
    "llama-scaled-rope": tf.LlamaConfig(**_SMALL, rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}),
    "llama-dynamic-rope": tf.LlamaConfig(
        **{**_SMALL, "max_position_embeddings": 128},
        rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0},
    ),
    "qwen2": tf.Qwen2Config(**_SMALL),
    "qwen2-window": tf.Qwen2Config(**_SMALL, use_sliding_window=True, sliding_window=12, max_window_layers=1),
    "qwen3": tf.Qwen3Config(**_SMALL, head_dim=16),
    "qwen3-moe": tf.Qwen3MoeConfig(**_SMALL, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32),
    "mistral-window": tf.MistralConfig(**_SMALL, head_dim=16, sliding_window=12),
    "mixtral": tf.MixtralConfig(**_SMALL),
    "gemma": tf.GemmaConfig(**_SMALL, head_dim=16),
    "gemma2": tf.Gemma2Config(**_SMALL, head_dim=16, query_pre_attn_scalar=16, sliding_window=12),
    "gemma3": tf.Gemma3TextConfig(**_SMALL, head_dim=16, query_pre_attn_scalar=16, sliding_window=12),
    "gpt-neox": tf.GPTNeoXConfig(**_NO_GROUPS),
    "gpt2": tf.GPT2Config(n_embd=64, n_layer=3, n_head=4, n_positions=512, initializer_range=0.3, **_ENDS),
    "opt": tf.OPTConfig(
        hidden_size=64, ffn_dim=128, num_hidden_layers=3, num_attention_heads=4, word_embed_proj_dim=64, init_std=0.3, **_ENDS
    ),
    "phi": tf.PhiConfig(**_SMALL),
    "phi3": tf.Phi3Config(**_SMALL),
    "granite": tf.GraniteConfig(**_SMALL),
    "olmo2": tf.Olmo2Config(**_SMALL),
    "stablelm": tf.StableLmConfig(**_SMALL),
    "starcoder2": tf.Starcoder2Config(**_SMALL),
    "cohere": tf.CohereConfig(**_SMALL),
    "smollm3": tf.SmolLM3Config(**_SMALL),
    "falcon": tf.FalconConfig(hidden_size=64, num_hidden_layers=3, num_attention_heads=4, initializer_range=0.3, **_ENDS),
    "bloom": tf.BloomConfig(hidden_size=64, n_layer=3, n_head=4, initializer_range=0.3, **_ENDS),
}
CONVERTED = {"qwen3-moe", "mixtral"}
"""transformers fuses their experts' weights, so these are copies."""
BF16_NEAR_TIE = 0.05
"""Maximum gap of the two best logits, relative to the spread of all, where a bfloat16 batch first
departs from a single stream.
"""

PROMPTS = [[7, 8, 9, 10, 11], list(range(20, 65)), [5], list(range(100, 117))]
TOKENS = 24
"""With the second prompt more than a block, with each more than the sliding windows."""


class LoadedModel:
    """A checkpoint as an engine loads it, a running batcher, and the reference model."""

    def __init__(self, directory: Path, dtype: str, kv_blocks: int | None = None) -> None:
        self.segment = WrittenSegment(directory)
        self.segment.write_index()
        self.start = EngineStart(
            instance_id="i", node="n", card=card_of(directory), device="cpu:0", kv_bytes=64 << 20, log_path="unused"
        )
        self.bound: BoundModel = bind_model(directory, self.segment.attached(), self.start, ModelCache())
        self.segment.write_data()
        self.files: ModelFiles = read_files(directory, self.start, ModelCache())
        self.computable: ReadyModel = loading.complete(self.bound, self.files, self.start, EngineSettings())
        limits = self.computable.limits
        self.limits = Limits(8, kv_blocks or limits.kv_blocks, limits.step_tokens, 16)
        self.reference = tf.AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, dtype)).eval()

    def close(self) -> None:
        self.segment.unlink()

    def generated(self, prompt: list[int]) -> list[int]:
        reported = self.reference.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=TOKENS,
            do_sample=False,
        )
        return list(reported[0, len(prompt) :].tolist())

    def request(self, number: int, prompt: Any, **body: Any) -> GenerationRequest:
        asked = {"model": "m", "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, **body}
        request = InferRequest(request_id=f"r{number}", instance_id="i", model="m", endpoint="completion", body=asked)
        result = self.computable.reader.read(request)
        assert isinstance(result, GenerationRequest)
        return result

    def run(self, requests: Sequence[GenerationRequest]) -> dict[str, dict[int, list[int]]]:
        """Serve all requests concurrently; return tokens by request and choice."""
        tokens: dict[str, dict[int, list[int]]] = {r.request_id: {c.index: [] for c in r.choices} for r in requests}
        left = set(tokens)

        def deliver(events: Sequence[Event]) -> None:
            for event in events:
                assert not isinstance(event, Broken), event
                if isinstance(event, Progressed):
                    for delta in event.deltas:
                        tokens[event.request_id][delta.index] += delta.token_ids
                    if event.done:
                        left.discard(event.request_id)
            if not left:
                batcher.stop()

        batcher = Batcher(self.computable.runner, self.computable.embedder, self.files.tokenization, self.limits, deliver)
        for request in requests:
            batcher.submit(request)
        loop = DeviceLoop(1)
        loop.serve("test", batcher).result(120)
        loop.stop()
        assert not left
        return tokens


def save(name: str, directory: Path, tokenizer: Path, dtype: torch.dtype) -> Path:
    torch.manual_seed(0)
    model = tf.AutoModelForCausalLM.from_config(copy.deepcopy(CONFIGS[name]), dtype=dtype)
    model.generation_config = tf.GenerationConfig()
    model.save_pretrained(directory)
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(tokenizer / file, directory / file)
    return directory


def running(names: Iterable[str]) -> list[Any]:
    """Return parameters of a test that runs the builtin engine with these configurations."""
    return [pytest.param(name, marks=pytest.mark.runs("builtin", CONFIGS[name].model_type)) for name in names]


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
