"""Models in stages."""

from __future__ import annotations

from typing import Any

from services.scheduler.domain.events import AddModelsRequested
from shared.contracts.base import ErrorBody
from shared.contracts.model_info import LayerSizes
from shared.contracts.models import ModelSpec
from tests.support.fake_node import MIB, model_info
from tests.unit.scheduler.world import World


def add_group(w: World, name: str, stages: int = 2, **options: Any) -> None:
    """Register a model in stages."""
    spec = ModelSpec(name=name, source=f"/m/{name}", stages=stages, max_concurrency=1, **options)
    layers = LayerSizes(count=8, embedding_bytes=MIB, layer_bytes=20 * MIB, head_bytes=MIB)
    info = model_info(spec.source, 160 * MIB).model_copy(update={"layers": layers})
    answer = w.admin(AddModelsRequested(w.now, f"add {name}", (spec,), {name: info}, False))
    assert not isinstance(answer, ErrorBody), answer
