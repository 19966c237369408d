"""Which models share a running engine."""

from __future__ import annotations

from typing import Any

import pytest

from shared.contracts.models import ModelCard
from shared.template_key import template_key
from tests.support.hosted import hosted_card

FROM_LOADER: dict[str, Any] = {"load_format": "thaw"}


def card(source: str = "/models/a", **options: Any) -> ModelCard:
    return hosted_card(source, "vllm", **{"engine_args": FROM_LOADER, **options})


def with_info(**info: Any) -> ModelCard:
    return card().model_copy(update={"info": card().info.model_copy(update=info)})


@pytest.mark.parametrize(
    "other",
    [
        card(name="b", source="/models/b", aliases=["c"]),
        card(keep_alive=1.0, priority=3, slo={"ttft": 1.0}, replicas={"min": 1}, init_timeout=5.0),
        with_info(source="/models/b", revision="r2", has_chat_template=False, special_token_ids=(1, 2)),
    ],
)
def test_names_files_and_scheduling_do_not_separate(other: ModelCard) -> None:
    assert template_key(card())
    assert template_key(other) == template_key(card())


@pytest.mark.parametrize(
    "other",
    [
        with_info(shape="s2"),
        with_info(task="embed"),
        card(dtype="float32"),
        card(context=128),
        card(max_concurrency=2),
        card(memory=1 << 30),
        card(env={"A": "b"}),
        card(network="host"),
        card(engine_args={**FROM_LOADER, "kv_cache_bytes": 1 << 26}),
        card(engine_args={**FROM_LOADER, "quantization": "fp8"}),
        card(engine_args={**FROM_LOADER, "chat_template": "/t.jinja"}),
    ],
)
def test_options_fixed_at_the_engines_start_separate(other: ModelCard) -> None:
    assert template_key(other)
    assert template_key(other) != template_key(card())


@pytest.mark.parametrize(
    "other",
    [
        card(engine_args={}),
        card(engine_args={**FROM_LOADER, "speculative_config": {}}),
        card(engine_args={**FROM_LOADER, "tokenizer": "/t"}),
        card(engine_args={**FROM_LOADER, "data_parallel_size": 2}),
        card(command=["x"]),
        card(stages=2, engine_args={**FROM_LOADER, "tensor_parallel_size": 2}),
        card(container={"image": "x", "port": 1}),
        card(trust_remote_code=True),
        with_info(shape=""),
        with_info(source="hf://a/b"),
        hosted_card("/models/a", "llamacpp"),
    ],
)
def test_models_whose_engine_cannot_change_have_no_key(other: ModelCard) -> None:
    assert template_key(other) == ""
