"""Inspection of models by config.json, tokenizer and headers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shared.contracts.model_info import ModelInfo
from shared.contracts.models import ModelSpec
from shared.errors import CheckpointInvalid, InvalidModel, ThawError, UnsupportedArchitecture
from tests.support.sources import inspected
from tests.unit.loader.checkpoints import CONFIG, write_checkpoint
from weights.formats.known_architectures import check_known
from weights.sources.open import open_source


def inspect(directory: Path, *, trust: bool = False) -> ModelInfo:
    return inspected(directory, trust=trust)


def described(tmp_path: Path, config: dict[str, Any]) -> ModelInfo:
    write_checkpoint(tmp_path / "m", config=config)
    return inspect(tmp_path / "m")


def test_inspection_reports_every_model_property(tmp_path: Path) -> None:
    weights = write_checkpoint(tmp_path / "m", shards=2)
    config = tmp_path / "m" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"vocab_size": 301}))
    found = inspect(tmp_path / "m")
    assert found.source == str(tmp_path / "m")
    assert (found.architecture, found.model_type, found.task) == ("LlamaForCausalLM", "llama", "generate")
    assert found.parameters == sum(w.size for w in weights.values())
    assert found.dtype == "float32"
    assert found.context_length == 512
    assert found.vocab_size == 301
    assert found.kv_bytes_per_token == 2 * 2 * 2 * 16 * 4
    assert found.has_chat_template
    assert found.files == 2
    assert found.weights_bytes > sum(w.nbytes for w in weights.values())


def test_special_tokens_are_read_from_the_tokenizer_files(tmp_path: Path) -> None:
    """Special tokens are read from tokenizer_config.json, else from tokenizer.json.

    Added ordinary tokens are text.
    """
    write_checkpoint(tmp_path / "m")
    listed = [{"id": 9, "special": True}, {"id": 4, "special": True}, {"id": 5, "special": False}, {"id": "6", "special": True}, 7]
    (tmp_path / "m" / "tokenizer.json").write_text(json.dumps({"added_tokens": listed}))
    assert inspect(tmp_path / "m").special_token_ids == (4, 9)
    named = {"7": {"special": True}, "8": {"special": False}, "x": {"special": True}, "9" * 5000: {"special": True}}
    (tmp_path / "m" / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": named}))
    assert inspect(tmp_path / "m").special_token_ids == (7,)


SMALL = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64}
GPT2 = {"n_layer": 3, "n_head": 4, "n_embd": 32}
GEMMA = {"num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 1, "hidden_size": 2048, "head_dim": 256}
GEMMA3 = {"model_type": "gemma3_text", "num_hidden_layers": 34, "hidden_size": 2560}
FALCON = {"multi_query": True, "num_hidden_layers": 1, "num_attention_heads": 71, "hidden_size": 4544, "max_position_embeddings": 9}


@pytest.mark.parametrize(
    ("architecture", "model_type", "config", "task", "context", "kv"),
    [
        ("GPT2LMHeadModel", "gpt2", {**GPT2, "n_ctx": 256}, "generate", 256, 2 * 3 * 32),
        ("GPT2LMHeadModel", "gpt2", {**GPT2, "n_positions": 128, "n_ctx": 256}, "generate", 128, 2 * 3 * 32),
        ("GPT2LMHeadModel", "gpt2", {}, "generate", 1024, 2 * 12 * 768),
        ("OPTForCausalLM", "opt", SMALL, "generate", 2048, 2 * 2 * 64),
        ("GPTNeoXForCausalLM", "gpt_neox", SMALL, "generate", 2048, 2 * 2 * 64),
        ("Qwen2ForCausalLM", "qwen2", {**SMALL, "num_key_value_heads": 2}, "generate", 32768, 2 * 2 * 2 * 16),
        ("Qwen3ForCausalLM", "qwen3", {**SMALL, "num_key_value_heads": 2}, "generate", 32768, 2 * 2 * 2 * 128),
        ("MistralForCausalLM", "mistral", {**SMALL, "head_dim": None}, "generate", 131072, 2 * 2 * 8 * 16),
        ("GemmaForCausalLM", "gemma", GEMMA, "generate", 8192, 2 * 2 * 256),
        ("Gemma3ForConditionalGeneration", "gemma3", {"text_config": GEMMA3}, "generate", 131072, 2 * 34 * 4 * 256),
        ("FalconForCausalLM", "falcon", FALCON, "generate", 9, 2 * 64),
        ("BertLMHeadModel", "bert", {"hidden_size": 24}, "generate", 512, 2 * 12 * 24),
        ("BertModel", "bert", {}, "embed", 512, 0),
        ("BertForMaskedLM", "bert", {}, "embed", 512, 0),
        ("XLMRobertaModel", "xlm-roberta", {"max_position_embeddings": 514}, "embed", 512, 0),
    ],
)
def test_task_context_and_kv_size_are_found_for_each_family(
    tmp_path: Path, architecture: str, model_type: str, config: dict[str, Any], task: str, context: int, kv: int
) -> None:
    found = described(tmp_path, {"architectures": [architecture], "model_type": model_type, **config})
    assert (found.task, found.context_length, found.kv_bytes_per_token) == (task, context, kv * 4)


def test_a_decoder_with_a_pooling_embeds(tmp_path: Path) -> None:
    config = {**CONFIG, "architectures": ["Qwen3Model"]}
    write_checkpoint(tmp_path / "m", config=config)
    with pytest.raises(UnsupportedArchitecture):
        inspect(tmp_path / "m")
    (tmp_path / "m" / "modules.json").write_text("[]")
    assert inspect(tmp_path / "m").task == "embed"


def test_the_dtype_of_most_bytes(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "m", {"a": np.zeros(100, np.float16), "b": np.zeros(40, np.float32)})
    assert inspect(tmp_path / "m").dtype == "float16"


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"architectures": ["T5ForConditionalGeneration"]}, UnsupportedArchitecture, "T5ForConditionalGeneration"),
        ({"architectures": ["BertForSequenceClassification"], "model_type": "bert"}, UnsupportedArchitecture, "supported are"),
        ({"architectures": ["LlamaModel"]}, UnsupportedArchitecture, "LlamaModel"),
        ({"architectures": []}, UnsupportedArchitecture, "names no architecture"),
        ({"architectures": None}, UnsupportedArchitecture, "names no architecture"),
        ({"quantization_config": {"quant_method": "gptq"}}, UnsupportedArchitecture, "gptq quantisation"),
        ({"auto_map": {"AutoConfig": "x.Y"}}, InvalidModel, "trust_remote_code: true"),
        ({"model_type": None}, CheckpointInvalid, "model_type"),
        ({"max_position_embeddings": -1}, CheckpointInvalid, "max_position_embeddings is -1"),
        ({"num_hidden_layers": "many"}, CheckpointInvalid, "num_hidden_layers is 'many'"),
        ({"model_type": "novel", "max_position_embeddings": None}, CheckpointInvalid, "does not say max_position_embeddings"),
    ],
)
def test_unsupported_models_are_refused(tmp_path: Path, change: dict[str, Any], error: type[ThawError], message: str) -> None:
    with pytest.raises(error, match=message):
        described(tmp_path, {**CONFIG, **change})


def test_remote_code_is_accepted_only_if_trusted(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, config={**CONFIG, "auto_map": {"AutoConfig": "x.Y"}})
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"auto_map": {"AutoTokenizer": ["x.Z", None]}}))
    assert inspect(tmp_path, trust=True).task == "generate"
    write_checkpoint(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"auto_map": {"AutoTokenizer": ["x.Z", None]}}))
    with pytest.raises(InvalidModel, match=r"tokenizer_config\.json wants to run"):
        inspect(tmp_path)


def test_integer_weights_are_not_served(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, {"a": np.zeros(9, np.int8)})
    with pytest.raises(InvalidModel, match="most weights are I8"):
        inspect(tmp_path)


@pytest.mark.parametrize("missing", ["config.json", "tokenizer.json", "model.safetensors"])
def test_missing_files_are_named(tmp_path: Path, missing: str) -> None:
    write_checkpoint(tmp_path)
    (tmp_path / missing).unlink()
    with pytest.raises(CheckpointInvalid, match=missing):
        inspect(tmp_path)


@pytest.mark.parametrize("files", [["tokenizer.model"], ["vocab.json", "merges.txt"], ["vocab.txt"]])
def test_other_tokenizer_files_are_accepted(tmp_path: Path, files: list[str]) -> None:
    write_checkpoint(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    for name in files:
        with pytest.raises(CheckpointInvalid, match="has no tokenizer"):
            inspect(tmp_path)
        (tmp_path / name).touch()
    inspect(tmp_path)


def test_chat_templates_are_found_in_every_location(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{}")
    assert not inspect(tmp_path).has_chat_template
    (tmp_path / "chat_template.jinja").touch()
    assert inspect(tmp_path).has_chat_template


def test_invalid_sources_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointInvalid, match="is not a directory"):
        inspect(tmp_path / "file")
    with pytest.raises(CheckpointInvalid, match="does not exist"):
        inspect(tmp_path / "none")
    for source in ("models/llama", "hf://onlyname", "hf://a/b@", "hf://../x"):
        with pytest.raises(InvalidModel, match="hf://org/name"):
            open_source(source)


@pytest.mark.parametrize(
    ("config", "more", "refused"),
    [
        ({"architectures": ["FooForCausalLM"], "model_type": "foo"}, {}, True),
        ({"architectures": ["FooForCausalLM"]}, {}, True),
        ({"architectures": ["LLaMAForCausalLM"]}, {}, False),
        ({"architectures": ["FooForCausalLM"], "model_type": "foo"}, {"trust_remote_code": True}, False),
        ({"architectures": ["FooForCausalLM"], "model_type": "foo"}, {"engine": "vllm"}, False),
        ({}, {}, False),
    ],
)
def test_the_builtin_engine_refuses_unknown_architectures(
    tmp_path: Path, config: dict[str, Any], more: dict[str, Any], refused: bool
) -> None:
    info = described(tmp_path, {**CONFIG, **config})
    spec = ModelSpec(name="m", source=str(tmp_path / "m"), **more)
    if refused:
        with pytest.raises(UnsupportedArchitecture, match="FooForCausalLM"):
            check_known(spec, info)
    else:
        check_known(spec, info)
