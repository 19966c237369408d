"""Models split for several devices.

The slices are those of transformers, and together they are the model.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from shared.errors import CheckpointInvalid, ThawError, UnsupportedArchitecture
from tests.support.examples import examples
from tests.unit.loader.convert.models import raw, stored, write_torch
from tests.unit.loader.convert.parallel_models import LLAMA, write_model
from weights.convert.job import convert
from weights.convert.parallel import Plan, plan_for
from weights.convert.tensor import SourceTensor, Split, part_shape, pieces
from weights.formats.checkpoint import open_checkpoint
from weights.formats.converted import INDEX_NAME

QWEN3_MOE: dict[str, Any] = {
    **LLAMA,
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 2,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 16,
    "mlp_only_layers": [0],
    "attention_bias": False,
}
PHI3: dict[str, Any] = {**LLAMA, "architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "pad_token_id": 0}


def dims(directory: Path) -> dict[str, int | None]:
    return {t["name"]: t["dim"] for t in json.loads((directory / INDEX_NAME).read_text())["tensors"]}


@pytest.mark.parametrize("ranks", [2, 4])
def test_llama_is_split_like_transformers(tmp_path: Path, ranks: int) -> None:
    weights = write_model(tmp_path / "m", {**LLAMA, "num_key_value_heads": 4})
    convert(tmp_path / "m", tmp_path / "out", ranks, check=True)
    parts = [stored(tmp_path / "out", rank, ranks) for rank in range(ranks)]
    divided = dims(tmp_path / "out")
    columns = (
        "q_proj.weight",
        "q_proj.bias",
        "k_proj.weight",
        "v_proj.bias",
        "gate_proj.weight",
        "up_proj.weight",
        "lm_head.weight",
    )
    for name, tensor in weights.items():
        expected = 0 if name.endswith(columns) else 1 if name.endswith(("o_proj.weight", "down_proj.weight")) else divided[name]
        assert divided[name] == expected
        slices = [tensor] * ranks if expected is None else tensor.chunk(ranks, expected)
        assert [p[name].data for p in parts] == [raw(s) for s in slices]
        assert [p[name].shape for p in parts] == [tuple(s.shape) for s in slices]
    assert divided["model.embed_tokens.weight"] is divided["model.norm.weight"] is None
    assert divided["model.layers.0.self_attn.o_proj.bias"] is None


def test_separate_experts_are_split(tmp_path: Path) -> None:
    weights = write_model(tmp_path / "m", QWEN3_MOE)
    assert "model.layers.1.mlp.experts.0.gate_proj.weight" in weights
    convert(tmp_path / "m", tmp_path / "out", 2)
    divided, parts = dims(tmp_path / "out"), [stored(tmp_path / "out", rank, 2) for rank in range(2)]
    for expert in range(2):
        for part, dim in (("gate_proj", 0), ("up_proj", 0), ("down_proj", 1)):
            name = f"model.layers.1.mlp.experts.{expert}.{part}.weight"
            assert divided[name] == dim
            assert [p[name].data for p in parts] == [raw(s) for s in weights[name].chunk(2, dim)]
    assert divided["model.layers.0.self_attn.q_norm.weight"] is None


def test_fused_experts_are_split_in_both_halves() -> None:
    plan = plan_of(QWEN3_MOE, 2)
    split = plan.split("model.layers.1.mlp.experts.gate_up_proj", "F32", (2, 32, 32))
    assert split == Split(1, blocks=2)
    tensor = torch.arange(2 * 32 * 32, dtype=torch.float32).view(2, 32, 32)
    gate, up = tensor.chunk(2, 1)
    for rank in range(2):
        assert part_of(tensor, split, rank, 2) == raw(torch.cat([gate.chunk(2, 1)[rank], up.chunk(2, 1)[rank]], 1))


def test_fused_projections_are_split_as_one_tensor(tmp_path: Path) -> None:
    weights = write_model(tmp_path / "m", PHI3)
    convert(tmp_path / "m", tmp_path / "out", 2)
    name = "model.layers.0.self_attn.qkv_proj.weight"
    assert [stored(tmp_path / "out", r, 2)[name].data for r in range(2)] == [raw(s) for s in weights[name].chunk(2, 0)]


def plan_of(config: dict[str, Any], ranks: int) -> Plan:
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "config.json").write_text(json.dumps(config))
        return plan_for(Path(name), ranks)


def part_of(tensor: torch.Tensor, split: Split | None, rank: int, ranks: int) -> bytes:
    data = memoryview(raw(tensor))
    source = SourceTensor("t", "F32", tuple(tensor.shape), len(data), lambda offset, length: data[offset : offset + length])
    return b"".join(bytes(p) for p in pieces(source, split, rank, ranks))


@settings(max_examples=examples(100), deadline=None)
@given(st.data())
def test_slices_equal_those_of_torch(data: st.DataObject) -> None:
    ranks, blocks = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 2))
    shape = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    dim = data.draw(st.integers(0, len(shape) - 1))
    shape[dim] *= ranks * blocks
    tensor = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)
    split = Split(dim, blocks)
    for rank in range(ranks):
        expected = torch.cat([b.chunk(ranks, dim)[rank] for b in tensor.chunk(blocks, dim)], dim)
        assert part_shape(tuple(shape), split, ranks) == tuple(expected.shape)
        assert part_of(tensor, split, rank, ranks) == raw(expected)


@pytest.mark.parametrize("dim", [0, 1])
def test_slices_larger_than_a_piece(dim: int) -> None:
    tensor = torch.arange(3000 * 1024, dtype=torch.float32).view(3000, 1024)
    for rank in range(2):
        assert part_of(tensor, Split(dim), rank, 2) == raw(tensor.chunk(2, dim)[rank])


@pytest.mark.parametrize(
    ("config", "ranks", "error", "message"),
    [
        (LLAMA, 4, CheckpointInvalid, "num_key_value_heads = 2, which cannot be divided by 4"),
        ({**LLAMA, "vocab_size": 63}, 2, CheckpointInvalid, "'lm_head.weight' of shape .* cannot be divided evenly by 2"),
        (
            {**LLAMA, "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]},
            2,
            UnsupportedArchitecture,
            "no tensor-parallel plan",
        ),
        ({**LLAMA, "quantization_config": {"quant_method": "gptq", "bits": 4}}, 2, UnsupportedArchitecture, "quantised"),
        ({"model_type": "nonesuch"}, 2, UnsupportedArchitecture, "transformers cannot read"),
        ({**LLAMA, "hidden_size": "wide"}, 2, UnsupportedArchitecture, "transformers cannot read"),
    ],
)
def test_indivisible_model_is_refused(
    tmp_path: Path, config: dict[str, Any], ranks: int, error: type[ThawError], message: str
) -> None:
    (tmp_path / "m").mkdir()
    save_file({"lm_head.weight": torch.zeros(63, 32), "other": torch.zeros(1)}, tmp_path / "m" / "model.safetensors")
    (tmp_path / "m" / "config.json").write_text(json.dumps(config))
    with pytest.raises(error, match=message):
        convert(tmp_path / "m", tmp_path / "out", ranks)
    assert {p.name for p in tmp_path.iterdir()} == {"m"}


def test_a_plan_without_the_needed_fields() -> None:
    plan = plan_of(QWEN3_MOE, 2)
    with pytest.raises(UnsupportedArchitecture, match=r"does not say how to divide model\.layers\.0\.mlp\.experts\.0\.w1\.weight"):
        plan.split("model.layers.0.mlp.experts.0.w1.weight", "F32", (4, 4))


def test_file_without_configuration_cannot_be_split(tmp_path: Path) -> None:
    torch.save({"a": torch.zeros(4)}, tmp_path / "a.pt")
    with pytest.raises(UnsupportedArchitecture, match="needs a model directory"):
        convert(tmp_path / "a.pt", tmp_path / "out", 2)


def test_equally_split_tied_tensors_stay_tied(tmp_path: Path) -> None:
    shared = torch.randn(64, 32)
    names = [f"model.layers.0.self_attn.{n}_proj.weight" for n in "qk"]
    write_torch(
        tmp_path / "m", {names[0]: shared, names[1]: shared, "model.norm.weight": shared, "model.embed_tokens.weight": shared}
    )
    (tmp_path / "m" / "config.json").write_text(json.dumps(LLAMA))
    done = convert(tmp_path / "m", tmp_path / "out", 2)
    assert done.tied == 2
    for rank in range(2):
        found = stored(tmp_path / "out", rank, 2)
        assert found[names[0]] == found[names[1]]
        assert found[names[0]].data == raw(shared.chunk(2)[rank])
        assert found["model.norm.weight"] == found["model.embed_tokens.weight"]
        assert found["model.norm.weight"].data == raw(shared)


def test_rank_is_opened_by_its_file_name(tmp_path: Path) -> None:
    write_model(tmp_path / "m", LLAMA)
    convert(tmp_path / "m", tmp_path / "out", 2)
    assert open_checkpoint(tmp_path / "out", 1, 2).files[0].name == "weights-00001-of-00002.thaw"
    for rank, ranks in ((0, 1), (2, 2), (-1, 2), (0, 4)):
        with pytest.raises(CheckpointInvalid, match=f"divided for 2 .*--tensor-parallel {ranks}"):
            open_checkpoint(tmp_path / "out", rank, ranks)
    with pytest.raises(CheckpointInvalid, match=f"thaw convert {tmp_path / 'm'} DST --tensor-parallel 2"):
        open_checkpoint(tmp_path / "m", 0, 2)
