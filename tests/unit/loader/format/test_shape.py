"""The shape of a model: what separates two models, and what does not."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weights.formats.safetensors import TensorEntry
from weights.formats.shape import shape_of

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "vocab_size": 1024,
    "rope_parameters": {"rope_theta": 10000.0},
    "dtype": "float32",
}
TENSORS = (
    TensorEntry("model.embed_tokens.weight", "F32", (1024, 64), 0, 1024 * 64 * 4),
    TensorEntry("model.norm.weight", "F32", (64,), 1024 * 64 * 4, 256),
)
SCALARS = st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=3)


def test_where_weights_lie_and_who_saved_them_does_not_separate() -> None:
    moved = [replace(t, offset=t.offset + 4096, sha256="ab") for t in reversed(TENSORS)]
    other = {**dict(reversed(CONFIG.items())), "_name_or_path": "a/b", "transformers_version": "5.0"}
    assert shape_of(other, moved) == shape_of(CONFIG, TENSORS)


@given(st.dictionaries(st.sampled_from([*CONFIG, "quantization_config", "rms_norm_eps", "new_key"]), SCALARS, min_size=1))
def test_any_other_key_of_the_configuration_separates(changed: dict[str, Any]) -> None:
    other = {**CONFIG, **changed}
    assert json.dumps(other, sort_keys=True) != json.dumps(CONFIG, sort_keys=True)
    assert shape_of(other, TENSORS) != shape_of(CONFIG, TENSORS)


@pytest.mark.parametrize(
    "tensors",
    [
        TENSORS[:1],
        (*TENSORS, TensorEntry("lm_head.weight", "F32", (1024, 64), 0, 1024 * 64 * 4)),
        (replace(TENSORS[0], dtype="BF16"), TENSORS[1]),
        (replace(TENSORS[0], shape=(1088, 64)), TENSORS[1]),
        (replace(TENSORS[0], name="embed.weight"), TENSORS[1]),
    ],
)
def test_tensors_of_other_names_types_or_shapes_separate(tensors: tuple[TensorEntry, ...]) -> None:
    assert shape_of(CONFIG, tensors) != shape_of(CONFIG, TENSORS)
