"""Learns the parameters of start times from measured starts (`start_times` predicts with them)."""

from __future__ import annotations

from collections.abc import Mapping

from services.scheduler.domain.cost.formulas import BRINGING, ENGINE, load_s
from services.scheduler.domain.cost.learned import Parameter, observe
from services.scheduler.domain.estimates.start_times import (
    CHANGING,
    DEFAULT_CHANGE_MS,
    DEFAULT_RESUME_MS,
    DEFAULT_REUSE_MS,
    LEAVING,
    LEAVING_MS,
    PRIOR_MS,
    RESUMING,
    REUSING,
    bandwidth,
    learned_values,
    name_of_key,
)
from services.scheduler.domain.state.cluster import ClusterState
from services.scheduler.domain.state.measurements import ANYWHERE, Estimate, estimate_key
from services.scheduler.domain.state.transaction import Transaction
from shared.contracts.phases import NEW_ZYGOTE, Phase, PhaseSpan, measure_covered
from shared.contracts.plans import RESTORES, Candidate, PlanRecord
from shared.template_key import template_key

_LEAST_MS = 10.0
"""Smaller differences do not matter."""
_LEAST_LOAD_MS = 1.0
"""A shorter load is no sample of a bandwidth."""


def updated_estimates(state: ClusterState, plan: PlanRecord) -> list[Estimate]:
    """Return the estimates after a finished plan: of the model on its node, anywhere, of the models
    with its template key, and of the node.

    The time that a start waited for a new zygote is not a sample of the next start.
    """
    chosen, model = plan.chosen, state.models.get(plan.model)
    if plan.outcome != "ready" or chosen is None or model is None:
        return []
    phases = _by_phase(plan)
    phases.pop(Phase.RESERVE.value, None)
    reserved = _reserved_ms(plan)
    found = []
    if chosen.clearing in ("evict", "suspend", "preempt", "migrate") and reserved is not None:
        found += [_estimate_moved(state, "", node, {LEAVING: reserved}, {LEAVING: LEAVING_MS}) for node in (chosen.node, ANYWHERE)]
    if plan.way == "template":
        if Phase.INIT.value not in phases:  # else it fell back to a cold start
            ready_ms = sum(phases.get(p.value, 0.0) for p in (Phase.CONTAINER, Phase.LOAD, Phase.PROFILE))
            woke = chosen.predicted.get(Phase.RESTORE.value, 0.0)
            changed = {CHANGING: max(0.0, ready_ms - woke)}
            found += [_estimate_moved(state, "", node, changed, {CHANGING: DEFAULT_CHANGE_MS}) for node in (chosen.node, ANYWHERE)]
        return found
    if plan.way in RESTORES:
        if (took := phases.get(Phase.RESTORE.value)) is not None:
            found.append(_estimate_moved(state, plan.model, chosen.node, {RESUMING: took}, {RESUMING: DEFAULT_RESUME_MS}))
        return found
    loads_itself, weights = model.card.spec.loads_itself, model.card.info.weights_bytes
    own = dict(phases)
    if not loads_itself:
        for name in BRINGING:
            own.pop(name, None)
        spans = [(s.start_ms, s.end_ms) for s in plan.measured if s.phase.value in BRINGING]
        ms = measure_covered(spans) - min(chosen.queued_ms, 0.9 * measure_covered(spans))
        missing = weights - chosen.resident_bytes
        if chosen.read_bytes is not None:
            own |= _observe_reuse(state, plan.model, chosen, ms, missing)
        elif ms > _LEAST_LOAD_MS and missing > 0 and chosen.source:
            own[bandwidth(chosen.source)] = speed = missing / (ms / 1e3)
            if not chosen.device_ids[0].startswith("cpu"):
                own[bandwidth(chosen.source, chosen.device_ids[0])] = speed
    anywhere = {k: v for k, v in own.items() if ":" not in k and k != REUSING}
    # The priors are those of the built-in engine. They do not bound other engines, whose starts may
    # take a minute.
    priors = PRIOR_MS if model.card.spec.engine == "builtin" else {}
    if key := template_key(model.card):
        found.append(_estimate_moved(state, name_of_key(key), ANYWHERE, anywhere, priors))
    return [
        *found,
        _estimate_moved(state, plan.model, chosen.node, own, priors),
        _estimate_moved(state, plan.model, ANYWHERE, anywhere, priors),
    ]


def stage_estimates(state: ClusterState, plan: PlanRecord, index: int, spans: tuple[PhaseSpan, ...]) -> list[Estimate]:
    """Return the estimates after a stage of a group on several nodes has loaded its part.

    Valid for the model are the start of the process, and the bandwidth of the part's bytes. The
    other phases depend on the number of layers, or include waiting for the other stages. Parts of
    one node share its links, so that neither measures the bandwidth.

    Args:
        state: The cluster.
        plan: The plan of the group.
        index: The stage's index.
        spans: The phases that its engine has measured.
    """
    chosen, model = plan.chosen, state.models.get(plan.model)
    if chosen is None or model is None or len(chosen.stage_sources) <= index:
        return []
    nodes = [chosen.node, *(device.partition("/")[0] for device in chosen.later_devices)]
    phases = _by_phase(plan.model_copy(update={"measured": spans}))
    anywhere = {name: phases[name] for name in ENGINE if name in phases}
    own, source, layers = dict(anywhere), chosen.stage_sources[index], model.card.info.layers
    ms = measure_covered([(s.start_ms, s.end_ms) for s in spans if s.phase.value in BRINGING])
    if layers is not None and source and ms > _LEAST_LOAD_MS and nodes.count(nodes[index]) == 1:
        stage = model.card.in_stages(len(nodes)).stages[index]
        own[bandwidth(source)] = min(model.card.info.weights_bytes, layers.bytes_of(stage)) / (ms / 1e3)
    if not own:
        return []
    return [
        _estimate_moved(state, plan.model, nodes[index], own, PRIOR_MS),
        _estimate_moved(state, plan.model, ANYWHERE, anywhere, PRIOR_MS),
    ]


def forget_model(tx: Transaction, model: str) -> None:
    """Drop what was learned of the starts of a model."""
    for node in (ANYWHERE, *tx.state.measured_on.get(model, ())):
        tx.drop(Estimate, estimate_key(model, node))


def forget_starts_on(tx: Transaction, node: str) -> None:
    """Drop what was learned of the starts on a node."""
    models = ("", *(model for model, nodes in tx.state.measured_on.items() if node in nodes))
    for model in models:
        tx.drop(Estimate, estimate_key(model, node))


def _observe_reuse(state: ClusterState, model: str, chosen: Candidate, ms: float, missing: int) -> dict[str, float]:
    """Return what a load to a separate device has measured: of the slower of its two parts."""
    device_id, read = chosen.device_ids[0], chosen.read_bytes or 0
    if chosen.peer_bytes:  # the loader measures the links between devices itself
        return {}
    if not missing and not read:
        return {REUSING: ms} if ms > 0 else {}
    known = learned_values(state, model, chosen.node)
    fixed = known[REUSING].value if REUSING in known else DEFAULT_REUSE_MS
    seconds = (ms - min(fixed, 0.5 * ms)) / 1e3
    if ms <= _LEAST_LOAD_MS:
        return {}
    bus = known.get(bandwidth("dram", device_id))
    if not read or (bus is not None and load_s(missing, bus.value) >= 0.9 * seconds):
        return {bandwidth("dram", device_id): missing / seconds}
    return {bandwidth(chosen.source, device_id): read / seconds} if chosen.source else {}


def _reserved_ms(plan: PlanRecord) -> float | None:
    """Return the milliseconds from the decision until victims were gone; None: without victims."""
    took = plan.chosen.took_ms if plan.chosen is not None else None
    decided = plan.measured_ms - took if plan.measured_ms is not None and took is not None else float("-inf")
    spans = [(max(s.start_ms, decided), s.end_ms) for s in plan.measured if s.phase is Phase.RESERVE and s.end_ms > decided]
    return measure_covered(spans) if spans else None


def _by_phase(plan: PlanRecord) -> dict[str, float]:
    """Return the measured milliseconds by phase, without those that are no samples."""
    sampled = tuple(s for s in plan.measured if not _of_the_zygote(s) and s.phase not in (Phase.QUEUE, Phase.MESH))
    return plan.model_copy(update={"measured": sampled}).measured_phases


def _of_the_zygote(span: PhaseSpan) -> bool:
    return span.phase is Phase.CONTAINER and span.detail.get("launcher") == NEW_ZYGOTE


def _estimate_moved(
    state: ClusterState, model: str, node: str, measured: Mapping[str, float], priors: Mapping[str, float]
) -> Estimate:
    known = dict(learned_values(state, model, node))
    for quantity, now in measured.items():
        before = known.get(quantity)
        if before is None and model and node != ANYWHERE:  # the value on other nodes is a better prior than the default
            prior = learned_values(state, model, ANYWHERE).get(quantity)
            before = Parameter(prior.value, prior.error) if prior is not None else None
        known[quantity] = observe(before, now, priors.get(quantity, now), 0.0 if ":" in quantity else _LEAST_MS)
    return Estimate(model, node, known)
