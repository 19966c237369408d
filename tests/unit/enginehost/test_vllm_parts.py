"""Which vLLMs ask the loader for parts of the weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from services.enginehost.drivers.port import Launch, Rank
from services.enginehost.drivers.vllm import Vllm
from services.enginehost.settings import HostSettings
from tests.support.hosted import hosted_card

ON_TWO_NODES = Rank(index=1, count=2, address="10.0.0.1", port=1, own_address="10.0.0.2")


def extra_config(tmp_path: Path, rank: Rank | None, ranks: int) -> dict[str, Any]:
    card = hosted_card("/m", "vllm", stages=2, engine_args={"load_format": "thaw", "tensor_parallel_size": 2})
    card = card.model_copy(update={"info": card.info.model_copy(update={"ranks": ranks})})
    settings = HostSettings(home=tmp_path)
    launch = Launch(card=card, device="cpu:0", kv_bytes=1, host="h", port=1, key="k", settings=settings, rank=rank)
    arguments = Vllm(launch).arguments()
    found: dict[str, Any] = json.loads(arguments[arguments.index("--model-loader-extra-config") + 1])
    return found


@pytest.mark.parametrize(
    ("rank", "ranks", "is_part"), [(None, 1, False), (ON_TWO_NODES, 1, True), (None, 2, True), (ON_TWO_NODES, 2, True)]
)
def test_ranks_take_parts_unless_they_share_all_weights_of_a_node(
    tmp_path: Path, rank: Rank | None, ranks: int, is_part: bool
) -> None:
    found = extra_config(tmp_path, rank, ranks)
    assert found.get("part", False) is is_part
    assert found["source"] == "/m"
