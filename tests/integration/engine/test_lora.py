"""LoRA in the engine's forward pass: output of each adapter alone and in any mix.

Adapters that do not fit are refused.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from services.engine.generation.lora_layers import LoraAdapter
from services.engine.generation.runner import Row
from services.engine.model import loading
from shared.contracts.loader import WeightsAttached
from shared.errors import CheckpointInvalid
from tests.integration.engine.loaded_model import BF16_NEAR_TIE, PROMPTS, LoadedModel
from tests.integration.engine.model_families import save
from tests.support.adapters import adapter_card, merge, write_adapter
from tests.support.segments import WrittenSegment

pytestmark = pytest.mark.usefixtures("one_thread")

CASES: dict[str, dict[str, Any]] = {
    "llama": {"targets": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"]},
    "qwen3": {"targets": ["q_proj", "down_proj"], "use_rslora": True},
    "gpt2": {"targets": ["c_attn", "c_fc"], "transposed": True},
    "opt": {"targets": ["q_proj", "fc1", "fc2"]},
    "phi3": {"targets": ["qkv_proj", "gate_up_proj"]},
    "gpt-neox": {"targets": ["query_key_value", "dense_4h_to_h"], "rank_pattern": {"dense_4h_to_h": 2}},
    "bloom": {"targets": ["query_key_value"], "alpha_pattern": {"query_key_value": 3}},
}
"""Packed and sequential, linear layers of both orientations, fused ones, and the head."""


class Attachments:
    """Adapters bound as the engine binds them."""

    def __init__(self) -> None:
        self._segments: list[WrittenSegment] = []

    def bind(self, loaded: LoadedModel, directory: Path) -> LoraAdapter:
        segment = WrittenSegment(directory).write()
        self._segments.append(segment)
        attached = WeightsAttached(
            weights_id=segment.name, segment=segment.name, directory=str(directory), total_bytes=segment.total_bytes, loaded_bytes=0
        )
        return loading.bind_lora(loaded.computable, adapter_card(directory), attached)

    def close(self) -> None:
        for segment in self._segments:
            segment.unlink()


@pytest.fixture
def attachments() -> Iterator[Attachments]:
    attachments = Attachments()
    yield attachments
    attachments.close()


def mixed(loaded: LoadedModel, adapters: list[LoraAdapter | None]) -> tuple[list[list[int]], list[list[int]]]:
    """Return responses of every prompt with every adapter, run alone and all at once."""
    pairs = [(prompt, adapter) for prompt in PROMPTS for adapter in adapters]
    requests = [replace(loaded.request(i, prompt), adapter=adapter) for i, (prompt, adapter) in enumerate(pairs)]
    alone = [loaded.run([request])[request.request_id][0] for request in requests]
    together = loaded.run(requests)
    return alone, [together[r.request_id][0] for r in requests]


@pytest.mark.parametrize("name", CASES)
def test_float32_adapter_output_is_independent_of_the_batch(
    name: str, tmp_path: Path, demo_directory: Path, attachments: Attachments
) -> None:
    base = save(name, tmp_path / "m", demo_directory, torch.float32)
    directories = [write_adapter(tmp_path / f"a{i}", base, seed=i, rank=2 + 3 * i, **CASES[name]) for i in range(2)]
    loaded = LoadedModel(base, "float32")
    try:
        adapters = [None, *(attachments.bind(loaded, d) for d in directories)]
        alone, together = mixed(loaded, adapters)
        assert together == alone
        untouched = copy.deepcopy(loaded.reference)
        for i, directory in enumerate([None, *directories]):
            loaded.reference = copy.deepcopy(untouched)
            if directory is not None:
                merge(loaded.reference, directory)
            assert alone[i :: len(adapters)] == [loaded.generated(p) for p in PROMPTS], f"adapter {i}"
        assert len({tuple(a) for a in alone}) == len(alone)
        for adapter in adapters:
            if adapter is not None and loaded.computable.runner is not None:
                loaded.computable.runner.forget(adapter)
        assert not any("forward" in m.__dict__ for m in loaded.bound.model.modules())
    finally:
        loaded.close()


def test_bfloat16_departs_only_at_near_ties(tmp_path: Path, demo_directory: Path, attachments: Attachments) -> None:
    """A bfloat16 model departs from the reference only at near-ties.

    One adapter is in bfloat16, as its base; the other is in float32, as PEFT saves it.
    """
    base = save("llama", tmp_path / "m", demo_directory, torch.bfloat16)
    dtypes = (torch.bfloat16, torch.float32)
    directories = [write_adapter(tmp_path / f"a{i}", base, seed=i, dtype=t) for i, t in enumerate(dtypes)]
    loaded = LoadedModel(base, "bfloat16")
    try:
        adapters = [None, *(attachments.bind(loaded, d) for d in directories)]
        alone, together = mixed(loaded, adapters)
        runner = loaded.computable.runner
        assert runner is not None
        for i, (one, many) in enumerate(zip(alone, together, strict=True)):
            first = next((k for k, (a, b) in enumerate(zip(one, many, strict=True)) if a != b), None)
            if first is None:
                continue
            prompt, adapter = PROMPTS[i // len(adapters)], adapters[i % len(adapters)]
            logits = runner.forward([Row(runner.new_state(), 0, [*prompt, *one[:first]], adapter)])[0]
            gap = float(logits[one[first]] - logits[many[first]]) / float(logits.std())
            assert abs(gap) <= BF16_NEAR_TIE
    finally:
        loaded.close()


def test_weights_are_not_copied(tmp_path: Path, demo_directory: Path, attachments: Attachments) -> None:
    base = save("llama", tmp_path / "m", demo_directory, torch.bfloat16)
    loaded = LoadedModel(base, "bfloat16")
    try:
        adapter = attachments.bind(loaded, write_adapter(tmp_path / "a", base))
        pointers = [p.a.data_ptr() for p in adapter.pairs.values()]
        files = max(pointers) - min(pointers)
        assert 0 < files < 1 << 20, "one mapping holds them all"
        assert {p.a.dtype for p in adapter.pairs.values()} == {torch.float32}
    finally:
        loaded.close()


def test_adapter_whose_halves_have_different_types_is_refused(
    tmp_path: Path, demo_directory: Path, attachments: Attachments
) -> None:
    """It would fail each step that computes it, with the requests of others."""
    base = save("llama", tmp_path / "m", demo_directory, torch.float32)
    file = write_adapter(tmp_path / "a", base) / "adapter_model.safetensors"
    halves = {name: t.bfloat16() if ".lora_B." in name else t for name, t in load_file(file).items()}
    save_file(halves, file, {"format": "pt"})
    loaded = LoadedModel(base, "float32")
    try:
        with pytest.raises(CheckpointInvalid, match="Save the adapter in one type"):
            attachments.bind(loaded, file.parent)
    finally:
        loaded.close()


@pytest.mark.parametrize(
    ("modules", "message"),
    [
        ({"model.layers.0.self_attn.q_proj": (64, 32)}, r"does not fit model.layers.0.self_attn.q_proj .* must be \[4, 64\]"),
        ({"model.layers.9.self_attn.q_proj": (64, 64)}, "no linear layer of its base"),
        ({"model.norm": (64, 64)}, "no linear layer of its base"),
    ],
)
def test_adapter_that_does_not_fit_the_model_is_refused(
    modules: dict[str, tuple[int, int]], message: str, tmp_path: Path, demo_directory: Path, attachments: Attachments
) -> None:
    base = save("llama", tmp_path / "m", demo_directory, torch.float32)
    loaded = LoadedModel(base, "float32")
    try:
        with pytest.raises(CheckpointInvalid, match=message):
            attachments.bind(loaded, write_adapter(tmp_path / "a", base, modules=modules, targets=["q_proj", "norm"]))
    finally:
        loaded.close()
