"""A world of nodes with one device each, and a model in stages."""

from __future__ import annotations

from typing import Any

from services.scheduler.domain.events import AddModelsRequested
from shared.contracts.base import ErrorBody
from shared.contracts.model_info import LayerSizes
from shared.contracts.models import ModelSpec
from tests.support.fake_node import MIB, model_info
from tests.unit.scheduler.world import World

STAGES = 2
BUDGET = 500 * MIB


def make(nodes: int = 3, budget: int = BUDGET, stages: int = STAGES, ranks: int = 1, **options: Any) -> World:
    """Return a world of nodes with one device of `budget` bytes, and a model in stages.

    Args:
        ranks: Those that its files are divided for.
    """
    w = World()
    for n in range(nodes):
        w.node(f"n{n}", budget)
    spec = ModelSpec(name="m", source="/m/m", stages=stages, max_concurrency=1, **options)
    layers = LayerSizes(count=8, embedding_bytes=MIB, layer_bytes=20 * MIB, head_bytes=MIB)
    info = model_info(spec.source, 160 * MIB).model_copy(update={"layers": layers, "ranks": ranks})
    answer = w.admin(AddModelsRequested(w.now, "add", (spec,), {"m": info}, False))
    assert not isinstance(answer, ErrorBody), answer
    return w
