"""A converted checkpoint loads as any other.

It loads into shared memory, into an engine, and into a user's program.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from services.engine.generation import attention
from services.engine.model import checkpoint as engine_checkpoint
from services.engine.model.segment import Segment
from shared.contracts.model_info import ModelInfo
from shared.dtypes import TORCH_NAMES
from tests.unit.loader.convert.models import raw, some_weights, write_torch
from tests.unit.loader.convert.parallel_models import LLAMA, write_model
from weights.convert.job import convert
from weights.formats.checkpoint import directory_revision, open_checkpoint
from weights.formats.inspect import check_small_files, describe
from weights.load import load_segment, measure
from weights.tensors import load_tensors

SHM = Path("/dev/shm")


@pytest.fixture
def segment_name() -> Iterator[str]:
    name = f"thaw-test-{secrets.token_hex(6)}"
    yield name
    (SHM / name).unlink(missing_ok=True)


def every_type() -> dict[str, torch.Tensor]:
    noise = torch.arange(64, dtype=torch.uint8)
    return {n: (noise % 2 if n == "BOOL" else noise.clone()).view(getattr(torch, theirs)) for n, theirs in TORCH_NAMES.items()}


def test_an_engine_binds_every_type_without_a_copy(tmp_path: Path, segment_name: str) -> None:
    weights = every_type()
    weights["tied"] = weights["BF16"]
    convert(write_torch(tmp_path / "m", weights), tmp_path / "out")
    load_segment(tmp_path / "out", segment_name)
    segment = Segment(segment_name)
    found = segment.tensors()
    assert found.keys() == weights.keys()
    for name, tensor in weights.items():
        assert (found[name].dtype, found[name].shape, raw(found[name])) == (tensor.dtype, tensor.shape, raw(tensor))
        assert segment.holds(found[name])
    assert found["tied"].data_ptr() == found["BF16"].data_ptr()


def test_a_program_gets_the_same_tensors(tmp_path: Path) -> None:
    weights = {**some_weights(), **every_type()}
    convert(write_torch(tmp_path / "m", weights), tmp_path / "out")
    found = load_tensors(tmp_path / "out")
    assert found.keys() == weights.keys()
    for name, tensor in weights.items():
        assert (found[name].dtype, found[name].shape, raw(found[name])) == (tensor.dtype, tensor.shape, raw(tensor))
    assert found["head.weight"].data_ptr() == found["embed.weight"].data_ptr()
    assert all(t.data_ptr() % 256 == 0 for t in found.values() if t.numel())
    assert measure(tmp_path / "out", 2)["bytes"] == open_checkpoint(tmp_path / "out").files[0].size


def test_ranks_of_a_converted_model_form_the_whole_tensor(tmp_path: Path) -> None:
    weights = write_model(tmp_path / "m", LLAMA)
    convert(tmp_path / "m", tmp_path / "out", 2)
    name = "model.layers.0.self_attn.o_proj.weight"
    parts = [load_tensors(tmp_path / "out", rank=rank, ranks=2)[name] for rank in range(2)]
    assert torch.equal(torch.cat(parts, 1), weights[name])


def info(directory: Path) -> ModelInfo:
    present = [p.name for p in directory.iterdir()]
    architecture, config = check_small_files(directory, present, trust_remote_code=False)
    found = open_checkpoint(directory)
    return describe(str(directory), directory_revision(found, config), architecture, found, directory, present)


@pytest.mark.parametrize("legacy", [False, True])
def test_an_old_model_runs_in_the_built_in_engine(tmp_path: Path, segment_name: str, legacy: bool) -> None:
    """An old model runs in the builtin engine.

    From a pickle with tied embeddings it gives the logits of transformers.
    """
    config = LlamaConfig(**{**LLAMA, "tie_word_embeddings": True})
    torch.manual_seed(1)
    reference = LlamaForCausalLM(config).eval()
    write_torch(tmp_path / "m", reference.state_dict(), legacy=legacy)
    (tmp_path / "m" / "config.json").write_text(json.dumps({**LLAMA, "tie_word_embeddings": True}))
    convert(tmp_path / "m", tmp_path / "out", check=True)
    described = info(tmp_path / "out")
    assert (described.dtype, described.parameters) == ("float32", sum(p.numel() for p in reference.parameters()))
    report = load_segment(tmp_path / "out", segment_name)
    assert report.total_bytes == described.weights_bytes
    attention.register()
    segment = Segment(segment_name)
    model = engine_checkpoint.bind(
        LlamaForCausalLM, AutoModelForCausalLM.from_config(config).config, segment.tensors(), torch.float32
    )
    assert engine_checkpoint.copied_parameters(model, segment) == []
    parameters = dict(model.named_parameters(remove_duplicate=False))
    assert all(torch.equal(p, parameters[n]) for n, p in reference.named_parameters(remove_duplicate=False))
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()


def test_an_adapter_is_described_alike(tmp_path: Path) -> None:
    module = "base_model.model.model.layers.0.self_attn.q_proj"
    weights = {f"{module}.lora_A.weight": torch.randn(4, 16), f"{module}.lora_B.weight": torch.randn(8, 4)}
    lora = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}
    (tmp_path / "lora").mkdir()
    (tmp_path / "lora" / "adapter_config.json").write_text(json.dumps(lora))
    save_file(weights, tmp_path / "lora" / "adapter_model.safetensors")
    convert(tmp_path / "lora", tmp_path / "out")
    (tmp_path / "pickled").mkdir()
    (tmp_path / "pickled" / "adapter_config.json").write_text(json.dumps(lora))
    torch.save(weights, tmp_path / "pickled" / "adapter_model.bin")
    convert(tmp_path / "pickled", tmp_path / "out2")
    described = [info(tmp_path / name) for name in ("lora", "out", "out2")]
    assert len({str(d.adapter) for d in described}) == 1
    assert described[0].adapter is not None
