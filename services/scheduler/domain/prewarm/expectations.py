"""Notify loaders of how soon each model is likely to be loaded.

Loaders with separate devices price reusable weights by it when they need pages (Tangram Eq. 2).
"""

from __future__ import annotations

from heapq import nlargest, nsmallest

from services.scheduler.domain.effects import SendExpectation
from services.scheduler.domain.prewarm.prefetch import HORIZON_S, likelihood
from services.scheduler.domain.state.cluster import ClusterState
from services.scheduler.domain.state.transaction import Transaction
from services.scheduler.domain.state.volatile import ExpectationSent
from shared.contracts.loader import EXPECT_EVERY_S, ExpectedModel, ExpectModels

MOST = 256
"""Models in one message, the likeliest ones."""
MOST_GROUPS = 4
"""Groups of loaders in one decision. With a decision each second, the rest has its turn in time."""


def send_expectations(tx: Transaction) -> None:
    """Send them to the groups of loaders for which the latest ones are too old.

    The groups are few, and few of them are sent at once: a timer examines a share of the nodes.
    """
    due = _list_due(tx.state, tx.now)
    models: tuple[ExpectedModel, ...] | None = None
    for group in nsmallest(MOST_GROUPS, due, key=due.__getitem__):
        models = models if models is not None else expected_models(tx)
        for node in tx.state.expecting[group]:
            if not tx.state.loaders[node].status.stopping and tx.state.is_loader_alive(node, tx.now, tx.policy.node_lost_after_s):
                tx.emit(SendExpectation(node, ExpectModels(token=tx.next_token(), horizon_s=HORIZON_S, models=models)))
        tx.put(ExpectationSent(group, tx.now))


def are_expectations_due(state: ClusterState, now: float) -> bool:
    """True if a tick sends them now."""
    return bool(_list_due(state, now))


def _list_due(state: ClusterState, now: float) -> dict[str, float]:
    """Return the groups of loaders for which the latest ones are too old, with their times."""
    sent = {g: s.sent_at if (s := state.expectations.get(g)) is not None else float("-inf") for g in state.expecting}
    return {g: at for g, at in sent.items() if now - at >= EXPECT_EVERY_S}


def expected_models(tx: Transaction) -> tuple[ExpectedModel, ...]:
    """Return the models that separate devices may get, likeliest first."""
    found = []
    for model in tx.state.models.values():
        card = model.card
        if card.spec.base is not None or card.spec.engine != "builtin":
            continue
        usage = tx.state.usage_history.get(model.key)
        chance = 1.0 if tx.state.waiting_count(model.key) else likelihood(usage, tx.now)
        found.append((chance, model.key, card))
    return tuple(
        ExpectedModel(
            weights_id=card.info.revision,
            source=card.info.source,
            likelihood=chance,
            latency_sensitivity=card.spec.latency_sensitivity,
        )
        for chance, _, card in nlargest(MOST, found, key=lambda f: (f[0], f[1]))
    )
