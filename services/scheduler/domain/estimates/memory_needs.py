"""Memory that the next start of a model books: measured where known, else configured."""

from __future__ import annotations

from services.scheduler.domain.state.cluster import ClusterState
from services.scheduler.domain.state.measurements import MeasuredMemory, MemoryProfile
from services.scheduler.domain.state.transaction import Transaction
from shared.contracts.models import ModelCard
from shared.contracts.node import InstanceState, InstanceStatus
from shared.sizing import find_most_bytes, need_of

GREW = 1.05
"""A later measurement larger by this factor replaces the first.

After two resumptions it no longer does: growth would then be a leak.
"""


def start_bytes(state: ClusterState, card: ModelCard, kind: str | None = None) -> int:
    """Return the bytes that a start books on devices of a kind (None: of the largest need).

    A measurement replaces the estimate of the runtime's share. Weights and KV cache are guaranteed
    to the engine and never booked below their size. The built-in engine keeps to its configured
    bytes.
    """
    configured = need_of(card)
    measured = state.measured.get(card.name)
    if measured is None or measured.generation != card.generation or card.spec.engine == "builtin":
        return configured.total
    found = [p.need_bytes for k, p in measured.by_kind.items() if kind in (None, k)]
    return max(*found, configured.total - configured.runtime) if found else configured.total


def learn_memory(tx: Transaction, s: InstanceStatus) -> None:
    """Store the measured memory of a suspended instance, or of one that has served requests.

    It is stored durably, so that later starts and later leaders book it. What a leak has added does
    not count, nor do bytes beyond its devices: the model would find no place any more.
    """
    model = tx.state.models.get(s.model)
    nbytes = _find_measured_bytes(s)
    if (
        model is None
        or model.card.generation != s.generation
        or model.card.spec.engine == "builtin"
        or not nbytes
        or not s.device_ids
    ):
        return
    kind = s.device_ids[0].partition(":")[0]
    known = tx.state.measured.get(s.model)
    by_kind = known.by_kind if known is not None and known.generation == s.generation else {}
    old = by_kind.get(kind)
    if old is not None and (nbytes <= GREW * old.need_bytes or s.suspension.resumes > 1):
        return
    info, booked = model.card.info, need_of(model.card)
    first = (old.first_bytes or old.need_bytes) if old is not None else nbytes
    nbytes = min(nbytes, find_most_bytes(max(first, booked.total)), _find_budget(tx, s, nbytes))
    if old is not None and nbytes <= old.need_bytes:
        return
    profile = MemoryProfile(
        need_bytes=nbytes,
        load_bytes=info.weights_bytes,
        kv_bytes_per_token=info.kv_bytes_per_token,
        runtime_bytes=max(0, nbytes - booked.weights - booked.kv),
        first_bytes=min(first, nbytes),
    )
    tx.put(MeasuredMemory(s.model, s.generation, model.card.spec.engine, {**by_kind, kind: profile}))


def _find_measured_bytes(s: InstanceStatus) -> int:
    """Return the measured bytes; 0 before the first request, when the engine has not used all
    memory.
    """
    if s.state.parked:
        return s.suspension.need_bytes
    return s.memory.private + s.memory.weights if s.state is InstanceState.READY and s.load.completed and s.memory.private else 0


def _find_budget(tx: Transaction, s: InstanceStatus, default: int) -> int:
    """Return the bytes that an instance may book on devices like its own, all together."""
    i = tx.state.instances.get(s.instance_id)
    node = tx.state.nodes.get(i.node) if i is not None else None
    budgets = [d.budget_bytes for d in node.devices if d.device_id in s.device_ids] if node is not None else []
    return min(budgets) * len(s.device_ids) if budgets else default


_PARALLEL = ("tensor_parallel_size", "tp_size", "tp", "pipeline_parallel_size", "pp_size")
"""Engine arguments of vLLM, SGLang and TensorRT-LLM whose product is the number of devices."""


def device_count(card: ModelCard) -> int:
    """Return how many devices of one node an instance uses."""
    if card.spec.engine == "builtin":
        return len(card.stages) or 1
    if not card.spec.engine_args:
        return 1
    found = 1
    for name in _PARALLEL:
        size = card.spec.engine_args.get(name, 1)
        if isinstance(size, int) and not isinstance(size, bool) and size > 1:
            found *= size
    return found
