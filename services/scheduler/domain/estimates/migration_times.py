"""Migration times learned by model: a and b of a·(t_in + t_out) + b."""

from __future__ import annotations

from services.scheduler.domain.cost.formulas import resume_s
from services.scheduler.domain.cost.learned import observe
from services.scheduler.domain.state.cluster import ClusterState
from services.scheduler.domain.state.entities import Instance
from services.scheduler.domain.state.migrations import DEFAULT_FIXED_S, DEFAULT_TOKEN_S, MigrationTimes
from services.scheduler.domain.state.transaction import Transaction
from shared.contracts.migration import MigrationRecord

SHORT_TOKENS = 32
"""A round of fewer tokens is a sample of b, a round of more tokens one of a."""
LEAST_S = 0.002


def learn_migration_times(tx: Transaction, record: MigrationRecord) -> None:
    """Learn from a migration's rounds: b from short ones, a from what longer ones take beyond b."""
    times = tx.state.migration_times.get(record.model) or MigrationTimes(record.model)
    per_token, fixed = times.per_token, times.fixed
    for r in record.rounds:
        took = r.took_ms / 1e3
        if 0 < r.tokens <= SHORT_TOKENS:
            fixed = observe(fixed, max(0.0, took - per_token.value * r.tokens), DEFAULT_FIXED_S, LEAST_S)
        elif r.tokens > SHORT_TOKENS:
            per_token = observe(per_token, max(0.0, took - fixed.value) / r.tokens, DEFAULT_TOKEN_S, LEAST_S / r.tokens)
    if (per_token, fixed) != (times.per_token, times.fixed):
        tx.put(MigrationTimes(record.model, per_token, fixed))


def resume_requests_s(state: ClusterState, i: Instance) -> float:
    """Return the seconds to resume all requests of an instance elsewhere, one after the other.

    The number of tokens follows from the KV cache in use.
    """
    times = state.migration_times.get(i.model) or MigrationTimes(i.model)
    model, report = state.models.get(i.model), state.reports.get(i.instance_id)
    load = report.status.load if report is not None else None
    active = load.active if load is not None else 0
    per_token = model.card.info.kv_bytes_per_token if model is not None else 0
    tokens = load.kv_bytes_used / per_token if load is not None and per_token else 0.0
    return resume_s(tokens, 0.0, times.per_token.value, 0.0) + times.fixed.value * max(1, active)
