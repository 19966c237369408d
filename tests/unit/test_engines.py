"""Options and requirements of foreign engines."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from shared.contracts.engines import CAPABILITIES
from shared.contracts.model_info import LinearShape
from shared.contracts.models import ModelSpec, routes_of
from shared.sizing import MIN_KV_BYTES, need_of
from tests.support.hosted import MIB, hosted_card


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"engine": "builtin", "command": ["x"]}, "for engines other than builtin"),
        ({"engine": "builtin", "source": "engine://x"}, "find their models themselves"),
        ({"engine": "openai"}, "needs a command, or a container"),
        ({"engine": "openai", "command": ["x"], "container": {"image": "i"}}, "exclude each other"),
        ({"engine": "ollama", "source": "engine://x"}, "memory and max_model_len"),
        ({"engine": "vllm", "source": "s3://bucket/m"}, "reads its model itself"),
        ({"engine": "vllm", "routes": ["/admin"]}, "must begin with /v1/"),
        ({"engine": "vllm", "container": {"image": "i", "mounts": ["a:b"]}}, "is not /host:/inside"),
        ({"engine": "vllm", "stop_signal": "SIGSTOP"}, "SIGTERM"),
        ({"engine": "llamacpp", "stages": 2}, "builtin engine and vllm"),
        ({"engine": "vllm", "stages": 2}, "their product is 2"),
        ({"engine": "vllm", "stages": 2, "engine_args": {"tensor_parallel_size": 4}}, "their product is 2"),
        (
            {"engine": "vllm", "stages": 2, "command": ["x"], "engine_args": {"tensor_parallel_size": 2}},
            "stages and command exclude",
        ),
        ({"engine": "vllm", "stages": 2, "network": "private", "engine_args": {"pipeline_parallel_size": 2}}, "network: private"),
        ({"engine": "vllm", "stages": 2, "park": True, "engine_args": {"pipeline_parallel_size": 2}}, "stages and park exclude"),
    ],
)
def test_conflicting_model_options_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        ModelSpec.model_validate({"name": "m", "source": "/m", **options})


def test_routes_are_the_engines_and_the_operators() -> None:
    assert "/v1/responses" in routes_of(ModelSpec(name="m", source="/m", engine="vllm"))
    own = ModelSpec(name="m", source="/m", engine="openai", command=("x",), routes=("/v1/rerank",))
    assert routes_of(own) == ("/v1/rerank",)


def test_booked_memory_depends_on_the_kind_of_engine() -> None:
    need = need_of(hosted_card("/m", "vllm"))
    assert need.weights == 10 * MIB
    assert need.runtime == CAPABILITIES["vllm"].runtime_bytes
    assert need_of(hosted_card("/m", "vllm", engine_args={"load_format": "thaw"})).converted == 10 * MIB
    assert need_of(hosted_card("/m", "llamacpp", dtype="float16")).converted == 0


def test_room_for_the_adapters_of_a_batch_is_booked_with_vllm() -> None:
    card = hosted_card("/m", "vllm", engine_args={"enable_lora": True, "max_loras": 3, "max_lora_rank": 32})
    matrices = (LinearShape(name="q", rows=64, columns=64, count=4), LinearShape(name="up", rows=256, columns=64, count=4))
    wide = card.model_copy(update={"info": card.info.model_copy(update={"modules": matrices})})
    assert card.info.dtype == "bfloat16"
    assert need_of(wide).runtime - need_of(card).runtime == 3 * 32 * 2 * 4 * (128 + 320)


def test_kv_cache_is_booked_in_the_compute_dtype() -> None:
    card = hosted_card("/m", "builtin", context=1024 * 1024)
    wide = card.model_copy(update={"spec": card.spec.model_copy(update={"dtype": "float32"})})
    assert card.info.dtype == "bfloat16"
    assert need_of(wide).kv == 2 * need_of(card).kv > 2 * MIN_KV_BYTES


@pytest.mark.parametrize("mib", [1, 20, 100, 5000])
def test_configured_memory_is_booked_exactly(mib: int) -> None:
    need = need_of(hosted_card("/m", "vllm", memory=mib * MIB))
    assert need.total == mib * MIB
    assert min(need.weights, need.converted, need.kv, need.runtime) >= 0


def test_engines_that_load_weights_themselves_are_recognized() -> None:
    assert not ModelSpec(name="m", source="/m").loads_itself
    assert ModelSpec(name="m", source="/m", engine="vllm").loads_itself
    assert not ModelSpec(name="m", source="/m", engine="vllm", engine_args={"load_format": "thaw"}).loads_itself
