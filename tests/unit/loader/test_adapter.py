"""LoRA adapters in PEFT's layout: inspection, refusals, and holders of weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from services.loader.domain.effects import Refused
from services.loader.domain.events import Attach, NodeReported, Release
from services.loader.domain.lifecycle import LOST_AFTER_S, MISSING_FOR_S
from shared.contracts.loader import adapter_holder, instance_of
from shared.contracts.model_info import AdapterInfo, LinearShape, ModelInfo
from shared.errors import CheckpointInvalid, InvalidModel, ThawError
from tests.support.sources import inspected
from tests.unit.loader.checkpoints import write_checkpoint
from tests.unit.loader.played import card, loaded

Q, DOWN = "model.layers.{}.self_attn.q_proj", "model.layers.{}.mlp.down_proj"


def write(directory: Path, tensors: Mapping[str, tuple[int, ...]] | None = None, dtype: Any = np.float32, **config: Any) -> Path:
    """Write an adapter of two layers.

    Args:
        tensors: Names and shapes of further tensors.
    """
    directory.mkdir(exist_ok=True)
    shapes: dict[str, tuple[int, ...]] = {}
    for i in range(2):
        shapes |= {
            f"base_model.model.{Q.format(i)}.lora_A.weight": (4, 64),
            f"base_model.model.{Q.format(i)}.lora_B.weight": (48, 4),
        }
    shapes |= dict(tensors or {})
    save_file({n: np.ones(s, dtype) for n, s in shapes.items()}, directory / "adapter_model.safetensors")
    defaults = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 16, "target_modules": ["q_proj", "down_proj"]}
    (directory / "adapter_config.json").write_text(json.dumps(defaults | config))
    return directory


def inspect(directory: Path) -> ModelInfo:
    return inspected(directory)


def test_inspection_of_an_adapter(tmp_path: Path) -> None:
    down = {
        f"base_model.model.{DOWN.format(1)}.lora_A.weight": (2, 160),
        f"base_model.model.{DOWN.format(1)}.lora_B.weight": (64, 2),
    }
    found = inspect(write(tmp_path / "a", down, rank_pattern={"down_proj": 2}, base_model_name_or_path="org/base", use_rslora=True))
    assert found.adapter is not None
    assert (found.adapter.rank, found.adapter.alpha, found.adapter.made_for) == (4, 16, "org/base")
    assert found.adapter.modules == (
        LinearShape(name="model.layers.*.mlp.down_proj", rows=64, columns=160, count=1),
        LinearShape(name="model.layers.*.self_attn.q_proj", rows=48, columns=64, count=2),
    )
    assert found.adapter.scale_of(Q.format(0)) == 8
    assert found.adapter.scale_of(DOWN.format(1)) == pytest.approx(16 / 2**0.5)
    assert found.parameters == 2 * (4 * 64 + 48 * 4) + 2 * 160 + 64 * 2
    assert found.weights_bytes > found.parameters * 4


def test_alpha_patterns_match_name_suffixes_in_order() -> None:
    info = AdapterInfo(rank=8, alpha=8, alpha_pattern={"layers.1.q": 2, "q": 4})
    assert [info.scale_of(m) for m in ("layers.1.q", "x.layers.1.q", "layers.2.q", "layers.1.xq")] == [0.25, 0.25, 0.5, 1]


def test_transposed_weights_are_supported(tmp_path: Path) -> None:
    found = inspect(write(tmp_path / "a", fan_in_fan_out=True))
    assert found.adapter is not None
    assert [(m.rows, m.columns) for m in found.adapter.modules] == [(64, 48)]


def test_adapter_revision_changes_with_its_settings(tmp_path: Path) -> None:
    before = inspect(write(tmp_path / "a")).revision
    raw = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
    (tmp_path / "a" / "adapter_config.json").write_text(json.dumps(raw | {"lora_alpha": 32}))
    assert inspect(tmp_path / "a").revision != before


def test_inspection_lists_a_model_s_matrices(tmp_path: Path) -> None:
    weights = {f"model.layers.{i}.q.weight": np.ones((4, 8), np.float32) for i in range(3)} | {
        "norm.weight": np.ones(4, np.float32)
    }
    write_checkpoint(tmp_path / "m", weights)
    assert inspect(tmp_path / "m").modules == (LinearShape(name="model.layers.*.q", rows=4, columns=8, count=3),)


A0 = f"base_model.model.{Q.format(0)}"


@pytest.mark.parametrize(
    ("kind", "tensors", "config", "message"),
    [
        (InvalidModel, {}, {"peft_type": "IA3"}, "type IA3"),
        (InvalidModel, {}, {"use_dora": True}, "DoRA"),
        (InvalidModel, {}, {"modules_to_save": ["lm_head"]}, "replaces whole modules"),
        (InvalidModel, {}, {"bias": "all"}, "biases"),
        (InvalidModel, {}, {"task_type": "SEQ_CLS"}, "SEQ_CLS"),
        (InvalidModel, {}, {"init_lora_weights": "pissa_niter_4"}, "pissa"),
        (InvalidModel, {}, {"alpha_pattern": {"(a+)+$": 1}}, "only names of modules"),
        (InvalidModel, {}, {"rank_pattern": {f"m{i}": 4 for i in range(300)}}, "at most 256"),
        (CheckpointInvalid, {}, {"rank_pattern": {"q_proj": "4"}}, "positive numbers"),
        (CheckpointInvalid, {}, {"alpha_pattern": 8}, "positive numbers"),
        (CheckpointInvalid, {}, {"lora_alpha": 10**400}, "positive numbers"),
        (CheckpointInvalid, {}, {"r": 0}, "positive numbers"),
        (CheckpointInvalid, {}, {"r": True}, "positive numbers"),
        (CheckpointInvalid, {}, {"lora_alpha": None}, "positive numbers"),
        (CheckpointInvalid, {}, {"r": 8}, "says that its rank is 8"),
        (CheckpointInvalid, {}, {"target_modules": ["v_proj"]}, "none of target_modules"),
        (CheckpointInvalid, {f"{A0}.lora_B.weight": (48, 5)}, {}, r"lora_B \[48, 5\]"),
        (CheckpointInvalid, {f"base_model.model.{DOWN.format(0)}.lora_A.weight": (4, 8)}, {}, "only one of"),
        (InvalidModel, {"base_model.model.model.embed_tokens.lora_embedding_A": (4, 8)}, {}, "embeddings"),
        (InvalidModel, {"base_model.model.lm_head.base_layer.weight": (100, 64)}, {}, "save_embedding_layers=False"),
        (InvalidModel, {f"{A0}.lora_magnitude_vector": (48,)}, {}, "DoRA"),
    ],
)
def test_unsupported_adapter_is_refused(
    kind: type[ThawError], tensors: Mapping[str, tuple[int, ...]], config: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(kind, match=message):
        inspect(write(tmp_path / "a", tensors, **config))


def test_weights_of_other_types_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidModel, match="weights of type I32"):
        inspect(write(tmp_path / "a", dtype=np.int32))


def test_pickled_weights_are_to_be_converted(tmp_path: Path) -> None:
    write(tmp_path / "a")
    (tmp_path / "a" / "adapter_model.safetensors").rename(tmp_path / "a" / "adapter_model.bin")
    with pytest.raises(CheckpointInvalid, match="thaw convert"):
        inspect(tmp_path / "a")


# Holders.


def test_adapter_is_released_with_its_instance() -> None:
    p = loaded("a", "b")
    p.do(Attach(10, adapter_holder("a", 1), card("w2"), "complete"))
    p.do(Attach(11, adapter_holder("b", 1), card("w2"), "complete"))
    p.do(Release(12, "a"))
    assert set(p.state.entries["w2"].holders) == {adapter_holder("b", 1)}
    refused = p.do(Attach(13, adapter_holder("a", 2), card("w2"), "complete"))
    assert isinstance(refused[0], Refused)
    p.do(Release(14, adapter_holder("b", 1)))
    assert set(p.state.entries["w1"].holders) == {"b"}


def test_adapter_stays_while_its_instance_is_known() -> None:
    p = loaded("a")
    p.do(Attach(10, adapter_holder("a", 7), card("w2"), "complete"))
    p.now += LOST_AFTER_S + 1
    for _ in range(3):
        p.do(NodeReported(frozenset({"a"})))
        p.now += MISSING_FOR_S
    assert set(p.state.entries["w2"].holders) == {adapter_holder("a", 7)}
    for _ in range(3):
        p.do(NodeReported(frozenset()))
        p.now += MISSING_FOR_S
    assert not any(e.holders for e in p.state.entries.values())


def test_holder_name_contains_its_instance() -> None:
    assert (instance_of("i-1"), instance_of(adapter_holder("i-1", 3))) == ("i-1", "i-1")
