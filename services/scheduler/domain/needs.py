"""How many bytes the next start of a model books: what was measured of it, where that is known, rather than the configured share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from services.scheduler.domain.heard import MeasuredNeed
from shared.contracts.models import ModelCard
from shared.contracts.node import InstanceStatus
from shared.sizing import need_of

if TYPE_CHECKING:
    from services.scheduler.domain.draft import Draft
    from services.scheduler.domain.state import ClusterState


def need_to_start(state: ClusterState, card: ModelCard) -> int:
    """Bytes of a device. What was measured stands for the runtime's share, which is a guess before; weights and KV cache are promised to the
    engine and never booked below their size. The built-in engine is told its bytes and keeps to them."""
    configured = need_of(card)
    measured = state.measured.get(card.name)
    if measured is None or measured.generation != card.generation or card.spec.engine == "builtin":
        return configured.total
    return max(measured.nbytes, configured.total - configured.runtime)


def learn_need(d: Draft, s: InstanceStatus) -> None:
    """Of a suspended instance, whose node has measured what its engine used at most. The first measurement counts: what an engine grows to
    over many resumptions is not what it starts with."""
    known = d.state.measured.get(s.model)
    if not s.state.parked or not s.suspension.need_bytes:
        return
    if known is None or known.generation != s.generation:
        d.put(MeasuredNeed(s.model, s.generation, s.suspension.need_bytes))


_PARALLEL = ("tensor_parallel_size", "tp_size", "tp", "pipeline_parallel_size", "pp_size")
"""Engine arguments by which vLLM, SGLang and TensorRT-LLM are told how many devices one instance has; their product counts."""


def devices_of(card: ModelCard) -> int:
    """How many devices an instance has, all of one node."""
    if card.spec.engine == "builtin" or not card.spec.engine_args:
        return 1
    found = 1
    for name in _PARALLEL:
        size = card.spec.engine_args.get(name, 1)
        if isinstance(size, int) and not isinstance(size, bool) and size > 1:
            found *= size
    return found
