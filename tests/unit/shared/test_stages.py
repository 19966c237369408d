"""Models in stages: their cards, their need of memory, and the starts of their processes."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from services.engine.stages.processes import later_starts
from services.scheduler.domain.estimates.memory_needs import device_count
from shared.contracts.engine import EngineStart
from shared.contracts.model_info import LayerSizes, ModelInfo
from shared.contracts.models import ModelCard, ModelSpec
from shared.contracts.stages import LayerRange, Stage, stage_holder, stage_instance, whole_instance
from shared.sizing import MIB, need_of


def card(stages: int, layers: int | None = 5, **options: Any) -> ModelCard:
    sizes = LayerSizes(count=layers, embedding_bytes=8 * MIB, layer_bytes=10 * MIB, head_bytes=9 * MIB) if layers else None
    info = ModelInfo(
        source="/m",
        revision="r",
        architecture="LlamaForCausalLM",
        model_type="llama",
        task="generate",
        weights_bytes=67 * MIB,
        parameters=1,
        dtype="float32",
        context_length=1024,
        kv_bytes_per_token=100 * 1024,
        layers=sizes,
    )
    return ModelCard(spec=ModelSpec(name="m", source="/m", stages=stages, **options), info=info, created=0)


def test_each_device_has_room_for_the_largest_stage() -> None:
    whole, staged = need_of(card(1)), need_of(card(2))
    assert device_count(card(1)) == 1
    assert device_count(card(2)) == 2
    assert staged.weights == 2 * (8 + 3 * 10 + 4) * MIB  # and two pages
    assert staged.runtime == 2 * whole.runtime
    assert staged.kv == -(-whole.kv * 3 // 5) * 2


def test_model_without_known_layers_has_no_stages() -> None:
    assert card(2, layers=None).stages == ()
    assert card(6, layers=5).stages == ()
    assert [s.count for s in card(2).stages] == [3, 2]


@pytest.mark.parametrize(
    "options", [{"engine": "vllm"}, {"isolation": "shared"}, {"park": True}, {"trust_remote_code": True}, {"base": "other"}]
)
def test_stages_exclude_what_they_do_not_support(options: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="stages"):
        ModelSpec(name="m", source="/m", stages=2, **options)


def test_first_stage_starts_the_others_on_their_devices() -> None:
    ranges = card(3).stages
    first = Stage(group_id="g", index=0, count=3, layers=ranges[0], secret="s" * 43)
    start = EngineStart(
        instance_id="i-1.node-0",
        node="node-0",
        card=card(3),
        device="cpu:0",
        devices=("cpu:0", "cpu:1", "cpu:2"),
        kv_bytes=7,
        stage=first,
        log_path="log",
    )
    later = later_starts(start)
    assert [s.instance_id for s in later] == ["s1-i-1.node-0", "s2-i-1.node-0"]
    assert [s.device for s in later] == ["cpu:1", "cpu:2"]
    assert [s.stage.layers for s in later if s.stage is not None] == list(ranges[1:])
    assert {s.stage.secret for s in later if s.stage is not None} == {first.secret}
    assert all(not later_starts(s) for s in later)
    assert later_starts(start.model_copy(update={"stage": None})) == ()
    assert later_starts(start.model_copy(update={"devices": ("cpu:0",)})) == ()


def test_names_of_stages_lead_back_to_their_instance() -> None:
    assert stage_instance("i-1.n", 0) == stage_holder("i-1.n", 0) == whole_instance("i-1.n") == "i-1.n"
    assert whole_instance(stage_instance("i-1.n", 3)) == "i-1.n"
    assert stage_holder("i-1.n", 3).partition("+")[0] == "i-1.n"


def test_sizes_bound_a_stage() -> None:
    sizes = LayerSizes(count=3, embedding_bytes=5, layer_bytes=10, head_bytes=7)
    assert sizes.bytes_of(LayerRange(first=0, end=2, total=3)) == 25
    assert sizes.bytes_of(LayerRange(first=1, end=2, total=3)) == 10
    assert sizes.bytes_of(LayerRange(first=2, end=3, total=3)) == 17


@pytest.mark.parametrize("size", [None, "two", [2]])
def test_tensor_parallel_size_that_is_no_number_is_a_validation_error(size: Any) -> None:
    with pytest.raises(ValidationError, match="needs as many ranks"):
        ModelSpec(name="m", source="/m", engine="vllm", stages=2, engine_args={"tensor_parallel_size": size})
