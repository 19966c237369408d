"""Replica targets: which model needs one more instance, and why."""

from __future__ import annotations

from services.scheduler.domain.policies.port import Demand
from services.scheduler.domain.state.entities import Instance, Model
from services.scheduler.domain.state.transaction import Transaction
from services.scheduler.domain.state.volatile import Overload
from services.scheduler.domain.values import replace, value
from shared.contracts.demand import OVERCOMMIT


@value(frozen=True, slots=True)
class ScaleUp:
    """One more instance that a model needs.

    Attributes:
        since: Arrival of the longest-waiting request.
        first_message_at: When the scheduler first received that demand.
    """

    model: Model
    trigger: str
    since: float
    first_message_at: float
    is_extra: bool = False
    is_burst: bool = False
    """One more pipeline group, beside others that start."""

    def waited_s(self, now: float) -> float:
        """Return the seconds since the model began to wait."""
        return now - min(self.since, self.first_message_at)


def next_scale_up(tx: Transaction, model: Model) -> ScaleUp | None:
    """Return the next instance that the model needs; None: it has enough."""
    name = model.key
    running = tx.state.live_instances(model)
    live = len(running)
    demand = tx.state.demand.get(name)
    waiting_model = tx.state.unschedulable.get(name)
    if live == 0 and tx.state.waiting_count(name):
        woken = [w.since for w in tx.state.waiters.values() if w.kind == "wake" and w.model == name]
        failure_history = tx.state.failures.get(name)
        trigger = (
            "retry"
            if failure_history and (failure_history.attempts or failure_history.kills)
            else "demand"
            if demand and demand.waiting
            else "wake"
        )
        since = min([*woken, *([demand.since] if demand and demand.since is not None else [])], default=tx.now)
        first_message_at = min(
            [*woken, *([g.last_message_at for g in demand.gateways if g.waiting] if demand else [])], default=tx.now
        )
        return ScaleUp(model, trigger, since, waiting_model.since if waiting_model else first_message_at)
    if live < model.min_replicas:
        return ScaleUp(model, "min_replicas", tx.now, waiting_model.since if waiting_model else tx.now)
    return _request_replica(tx, model, running)


def _request_replica(tx: Transaction, model: Model, running: list[Instance]) -> ScaleUp | None:
    """Return one more replica if the profile's target has exceeded the replicas for long enough."""
    name = model.key
    lasting = list_lasting(tx, model, running)
    if not running or len(lasting) >= model.card.spec.replicas.max:
        tx.drop(Overload, name)
        return None
    if len(lasting) < len(running) and any(i.stages > 1 and i.ready_at is None for i in running):
        # the groups' stages have the links until they are ready
        return _request_group(tx, model, running) if not lasting else None
    enough = max(len(lasting), 1)  # a group is replaced under load if that needs several instances
    if tx.policy.profile.scale(replace(measure_demand(tx, model, running), live=len(lasting))) <= enough:
        tx.drop(Overload, name)
        return None
    overload = tx.state.overload.get(name) or Overload(name, tx.now)
    tx.put(overload)
    if tx.now - overload.since <= tx.policy.scale_up_after_s:
        return None
    return ScaleUp(model, "replicas", overload.since, tx.now, is_extra=True)


def burst_key(model: str) -> str:
    """Return the subject of the pause after no further group of a model had a place."""
    return f"burst\0{model}"


def _request_group(tx: Transaction, model: Model, groups: list[Instance]) -> ScaleUp | None:
    """Return one more group of a cold model, if more requests wait than its groups will be sent.

    A surge starts several groups at once (HydraServe §6.1), as long as none is ready. From then on
    whole instances start for what still waits.
    """
    if len(groups) >= model.card.spec.replicas.max or any(i.ready_at is not None for i in groups):
        return None
    demand = tx.state.demand.get(model.key)
    waiting = demand.waiting if demand is not None else 0
    if waiting <= len(groups) * OVERCOMMIT * max(1, model.card.spec.max_concurrency) or tx.is_cooling_down(burst_key(model.key)):
        return None
    since = demand.since if demand is not None and demand.since is not None else tx.now
    return ScaleUp(model, "replicas", since, tx.now, is_extra=True, is_burst=True)


def list_lasting(tx: Transaction, model: Model, running: list[Instance]) -> list[Instance]:
    """Return the instances without the groups that whole instances replace (ADR 0062)."""
    if not tx.policy.consolidate or model.card.spec.stages > 1:
        return running
    return [i for i in running if i.stages == 1]


def count_running(tx: Transaction, model: Model, running: list[Instance]) -> int:
    """Return the requests that the model's instances have.

    Gateways repeat their demand only while requests wait there. What a group has then is known from
    its reports, and decides how many instances it becomes.
    """
    demand = tx.state.demand.get(model.key)
    sent = demand.in_flight if demand is not None else 0
    if not any(i.stages > 1 for i in running):
        return sent
    loads = [r.status.load for i in running if (r := tx.state.reports.get(i.instance_id)) is not None]
    return max(sent, sum(x.active + x.waiting for x in loads))


def _count_queued(tx: Transaction, running: list[Instance]) -> int:
    """Return the requests in the queues of groups, which wait for whole instances."""
    groups = (tx.state.reports.get(i.instance_id) for i in running if i.stages > 1)
    return sum(r.status.load.waiting for r in groups if r is not None)


def measure_demand(tx: Transaction, model: Model, running: list[Instance]) -> Demand:
    """Return the model's load as a policy sees it, and the capacity of one of its instances."""
    name = model.key
    demand = tx.state.demand.get(name)
    capacity = 0
    for i in running:
        report = tx.state.reports.get(i.instance_id)
        capacity += report.status.capacity if report and i.ready_at is not None else model.card.spec.max_concurrency
    queued = _count_queued(tx, running)
    return Demand(
        model=name,
        waiting=(demand.waiting if demand else 0) + queued,
        running=max(0, count_running(tx, model, running) - queued),
        live=len(running),
        capacity=max(1, capacity // max(1, len(running))),
        window_requests=demand.window if demand else 0,
        min_replicas=model.min_replicas,
        max_replicas=model.card.spec.replicas.max,
        peak_requests=demand.peak if demand else 0,
    )
