"""The ledger of fetches: what each node still has to fetch from remote sources, and until when.

1. A fetch is recorded when its loader is sent `PrepareWeights`. A new leader learns it from
   the loader's report.
2. Each report of the loader replaces its pending bytes; between reports they fall by Eq. 4 of
   HydraServe.
3. It ends when its bytes are there, when its instance or stage is ready, or gone.
"""

from __future__ import annotations

from services.scheduler.domain.cost.formulas import AFTER
from services.scheduler.domain.estimates.start_times import Forecast
from services.scheduler.domain.state.cluster import ClusterState
from services.scheduler.domain.state.entities import CONSOLIDATION, Instance, Model
from services.scheduler.domain.state.transaction import Transaction
from services.scheduler.domain.state.volatile import Fetch
from shared.contracts.loader import LoaderStatus, SegmentStatus
from shared.contracts.models import ModelCard
from shared.contracts.stages import LayerRange, RankOf, part_id, whole_instance


def record_fetch(
    tx: Transaction,
    i: Instance,
    node: str,
    holder: str,
    card: ModelCard,
    layers: LayerRange | None = None,
    rank: RankOf | None = None,
) -> None:
    """Record that a node fetches weights for an instance, or for a stage or a rank of it (1)."""
    model = tx.state.models.get(i.model)
    if model is None or "://" not in card.info.source or card.spec.loads_itself or not Forecast(tx.state, card).fetches(node):
        return
    nbytes, weights_id = card.info.part_bytes(layers, rank), part_id(card.info.revision, layers, rank)
    tx.put(Fetch(holder, node, i.model, weights_id, float(nbytes), _compute_deadline(tx, i, model), tx.now))


def _compute_deadline(tx: Transaction, i: Instance, model: Model) -> float | None:
    """Return when its bytes must be there for a first token in time.

    None: it has no objective, or no request waits for it.
    """
    objective = model.card.spec.slo.ttft
    if objective is None or i.trigger == CONSOLIDATION:
        return None
    plan = tx.state.plans.get(i.plan_id)
    predicted = plan.chosen.predicted if plan is not None and plan.chosen is not None else {}
    return i.requested_at + objective - sum(predicted.get(phase, 0.0) for phase in AFTER) / 1e3


def apply_fetch_status(tx: Transaction, status: LoaderStatus) -> None:
    """Update the fetches of a node from its loader's report (2)."""
    held = {(s.weights_id, holder): s for s in status.segments for holder in s.holders}
    known = {}
    for f in tx.state.fetches_of(status.node):
        known[f.holder] = f
        segment = held.get((f.weights_id, f.holder))
        if segment is None or segment.total_bytes <= 0:  # its index is not there yet
            continue
        if segment.error is not None or _count_pending(segment) <= 0:
            tx.drop(Fetch, f.key)
        else:
            tx.put(Fetch(f.holder, f.node, f.model, f.weights_id, _count_pending(segment), f.deadline, tx.now))
    for (weights_id, holder), segment in held.items():
        if holder not in known and segment.fetched_bytes and _count_pending(segment) > 0 and segment.error is None:
            _adopt(tx, status.node, holder, weights_id, _count_pending(segment))


def _adopt(tx: Transaction, node: str, holder: str, weights_id: str, pending: float) -> None:
    if (
        (i := _find_owner(tx.state, holder)) is not None
        and i.ready_at is None
        and (model := tx.state.models.get(i.model)) is not None
    ):
        tx.put(Fetch(holder, node, i.model, weights_id, pending, _compute_deadline(tx, i, model), tx.now))


def _count_pending(segment: SegmentStatus) -> float:
    """Return the bytes that are still to be fetched."""
    return float(segment.total_bytes - max(segment.fetched_bytes, segment.loaded_bytes))


def end_fetches(tx: Transaction) -> None:
    """End the fetches of what is ready or gone, at the end of each decision (3)."""
    for f in list(tx.state.fetches.values()):
        i = _find_owner(tx.state, f.holder)
        if i is None or i.ready_at is not None or i.leaving != "no":
            tx.drop(Fetch, f.key)


def _find_owner(state: ClusterState, holder: str) -> Instance | None:
    """Return the instance that a holder of weights belongs to, by itself or as a stage."""
    stage = state.later_stages.get(holder)
    return state.instances.get(stage.first if stage is not None else whole_instance(holder).partition("+")[0])
