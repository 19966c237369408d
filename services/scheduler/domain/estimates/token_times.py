"""The time per output token of a model in one engine, measured from reports of its load.

A group takes at worst as long as all its stages together for a token (HydraServe, Eq. 2), so that
its time is known only once that of one engine is.
"""

from __future__ import annotations

from services.scheduler.domain.cost.learned import observe
from services.scheduler.domain.estimates.start_times import learned_values
from services.scheduler.domain.state.cluster import ClusterState
from services.scheduler.domain.state.entities import Instance
from services.scheduler.domain.state.measurements import ANYWHERE, Estimate
from services.scheduler.domain.state.transaction import Transaction
from shared.contracts.engine import EngineLoad

TOKEN = "token"
"""The learned quantity: milliseconds for each further token of a sequence."""
_LEAST_S = 0.5
_SETTLED = 5
"""After so many samples, one that differs by less than `_SAME` is not stored."""
_SAME = 0.1


def measure_token_ms(old: EngineLoad, new: EngineLoad, seconds: float) -> float | None:
    """Return the milliseconds per token of each sequence; None: the reports do not measure it.

    The same sequences run in both reports. Where a prompt is among them the value is too high.

    Args:
        old: The earlier report.
        new: The later one.
        seconds: The time between them.
    """
    tokens = new.generated_tokens - old.generated_tokens
    is_steady = 0 < old.active == new.active and old.completed == new.completed and not (old.waiting or new.waiting)
    if not is_steady or seconds < _LEAST_S or tokens < 2 * new.active:
        return None
    return new.active * seconds * 1e3 / tokens


def learn_token_time(tx: Transaction, i: Instance, new: EngineLoad) -> None:
    """Learn from the report of an instance; only for models whose placement depends on it.

    An engine reports its load once a second, and its node repeats the load in each of its messages.
    Therefore the time counts from the first message with the last load, not from the last message.
    """
    model, report = tx.state.models.get(i.model), tx.state.reports.get(i.instance_id)
    if model is None or report is None or model.card.spec.slo.tpot is None or model.card.spec.engine != "builtin":
        return
    ms = measure_token_ms(report.status.load, new, tx.now - report.load_changed_at)
    if ms is None or i.stages > 1 or model.card.stages:  # a group measures itself, not one engine
        return
    known = learned_values(tx.state, i.model, ANYWHERE)
    before = known.get(TOKEN)
    if before is None or before.count < _SETTLED or abs(ms - before.value) > _SAME * before.value:
        tx.put(Estimate(i.model, ANYWHERE, {**known, TOKEN: observe(before, ms, ms)}))


def token_s(state: ClusterState, model: str) -> float | None:
    """Return the seconds per token of one engine of the model; None: not measured yet."""
    known = learned_values(state, model, ANYWHERE).get(TOKEN)
    return known.value / 1e3 if known is not None else None
