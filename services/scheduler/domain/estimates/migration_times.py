"""Migration times learned by model and by pair of nodes: a and b of a·(t_in + t_out) + b.

Devices differ in how fast they recompute, and connections in how fast they send keys and values. A
pair of nodes begins with the model's times, and a model with the defaults.
"""

from __future__ import annotations

from services.scheduler.domain.cost.formulas import resume_s
from services.scheduler.domain.cost.learned import Parameter, observe
from services.scheduler.domain.state.cluster import ClusterState
from services.scheduler.domain.state.entities import Instance
from services.scheduler.domain.state.migrations import DEFAULT_FIXED_S, DEFAULT_TOKEN_S, MigrationTimes, PairTimes
from services.scheduler.domain.state.transaction import Transaction
from shared.contracts.migration import MigrationRecord, MigrationRound

SHORT_TOKENS = 32
"""A round of fewer tokens is a sample of b, a round of more tokens one of a."""
LEAST_S = 0.002
PAIRS_KEPT = 64
"""Pairs of nodes for each model; those that were measured longest ago are forgotten."""


def learn_migration_times(tx: Transaction, record: MigrationRecord) -> None:
    """Learn from a migration's rounds: b from short ones, a from what longer ones take beyond b."""
    if record.model not in tx.state.models:  # removed while its requests moved
        return
    times = tx.state.migration_times.get(record.model) or MigrationTimes(record.model)
    per_token, fixed = times.per_token, times.fixed
    pair = times.find_pair(record.source_node, record.node)
    pair_token, pair_fixed = pair.per_token, pair.fixed
    for r in record.rounds:
        own_token, own_fixed = pair_token or per_token, pair_fixed or fixed
        if 0 < r.tokens <= SHORT_TOKENS:
            fixed = _observe_fixed(fixed, r, per_token, DEFAULT_FIXED_S)
            pair_fixed = _observe_fixed(pair_fixed, r, own_token, own_fixed.value)
        elif r.tokens > SHORT_TOKENS:
            per_token = _observe_per_token(per_token, r, fixed, DEFAULT_TOKEN_S)
            pair_token = _observe_per_token(pair_token, r, own_fixed, own_token.value)
    if (per_token, fixed, pair_token, pair_fixed) != (times.per_token, times.fixed, pair.per_token, pair.fixed):
        others = [p for p in times.pairs if (p.source, p.destination) != (pair.source, pair.destination)]
        newest = PairTimes(pair.source, pair.destination, pair_token, pair_fixed)
        tx.put(MigrationTimes(record.model, per_token, fixed, (*others, newest)[-PAIRS_KEPT:]))


def _observe_fixed(known: Parameter | None, r: MigrationRound, per_token: Parameter, prior: float) -> Parameter:
    return observe(known, max(0.0, r.took_ms / 1e3 - per_token.value * r.tokens), prior, LEAST_S)


def _observe_per_token(known: Parameter | None, r: MigrationRound, fixed: Parameter, prior: float) -> Parameter:
    return observe(known, max(0.0, r.took_ms / 1e3 - fixed.value) / r.tokens, prior, LEAST_S / r.tokens)


def migration_times_between(state: ClusterState, model: str, source: str, destination: str = "") -> MigrationTimes:
    """Return the times of a model's migrations between two nodes.

    An empty `destination` is any node: the times of the model.
    """
    times = state.migration_times.get(model) or MigrationTimes(model)
    return times.find_between(source, destination) if destination else times


def resume_requests_s(state: ClusterState, i: Instance, destination: str = "") -> float:
    """Return the seconds to resume all requests of an instance elsewhere, one after the other.

    The number of tokens follows from the KV cache in use. An empty `destination` is any node.
    """
    times = migration_times_between(state, i.model, i.node, destination)
    model, report = state.models.get(i.model), state.reports.get(i.instance_id)
    load = report.status.load if report is not None else None
    active = load.active if load is not None else 0
    per_token = model.card.info.kv_bytes_per_token if model is not None else 0
    tokens = load.kv_bytes_used / per_token if load is not None and per_token else 0.0
    return resume_s(tokens, 0.0, times.per_token.value, 0.0) + times.fixed.value * max(1, active)
