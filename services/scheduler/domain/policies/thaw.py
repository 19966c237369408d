"""Thaw's own policy: the papers' ideas under one cost model.

It minimises the total time: of the asking model until it is ready, and of the victims, weighted by
the probability that they are used.

- Order: priority of the model, then of its requests, then models without an instance before extra
  replicas, then those that have waited for `STARVING_S`. Then asks that can still meet their
  objective: functions that this makes compliant first (Torpor's queue, §5.2), the earliest deadline
  first. An ask whose key is more than `LEAD_S` device-seconds ahead of the one with the least has
  no such precedence. Then late asks, those that no start makes in time, and those without an
  objective, by fair shares of the keys (start-time fair queueing): a missed objective is missed
  once, and delaying another for it would miss two. Of one key the most requests times wait first:
  one start serves all requests of a model (R x W, Aksoy and Franklin, INFOCOM '98).
- Victims: of idle instances, the cheapest that free enough by Tangram's cost p · (s/b) · alpha
  (§3.2.2), where p is the probability of use before they would stop anyway, and s/b the delay of
  all requests that arrive until they are back; starts for parking first. If they do not suffice,
  serving ones: migrated in the least total time (ServerlessLLM §6.2), or preempted, low priority
  and short queues first (SwapServeLLM §3.5), where waiting would take longer than the preemption
  costs.
- Option: the least sum of its own time and the others' loss per waiting request. A load that shares
  a bus costs the neighbour its duration (Torpor §5.3). Busy instances of a device compute in turns,
  which delays both. Devices of a recent failure are last, and preemption is used without
  alternative only. Options that meet the objective are first.
- Scale: HydraServe's autoscaler (§6.1) from waiting, running and, for batching engines, expected
  requests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from services.scheduler.domain.cost.cost import Clearing
from services.scheduler.domain.cost.formulas import total_delay_s
from services.scheduler.domain.policies import torpor_queue
from services.scheduler.domain.policies.autoscaling import predict_requests
from services.scheduler.domain.policies.common import clamp_replicas
from services.scheduler.domain.policies.knapsack import EvictionCandidate, least_time
from services.scheduler.domain.policies.port import Ask, Clearance, Demand, DeviceView, Option, Profile, Resident, Usage

LEAD_S = 30.0
"""Device-seconds that a key's models with objectives may take before others get their share."""
STARVING_S = 60.0
"""After this wait a model goes before those of its priority that can still meet an objective.

Otherwise these could keep it waiting for ever. The live scheduler has the same rule for every
profile, `Policy.starve_after_s`.
"""


def order(asks: Sequence[Ask], book: Mapping[str, Usage], alpha: float) -> list[Ask]:
    """Order asks.

    Higher priority first, extra replicas last, then starving asks. Then objectives that can still
    be met, of functions that become compliant by it (Torpor §5.2), the earliest deadline first,
    unless their key is `LEAD_S` ahead. Then missed objectives, those that a start would miss, and
    asks without one, those of the key that has received the least first, then the most requests
    times wait.
    """
    least = min([a.share_s for a in asks], default=0.0)
    high = torpor_queue.high_priority(book, alpha) if book and len(asks) > 1 else frozenset()

    def place(a: Ask) -> tuple[object, ...]:
        left = _compute_seconds_left(a)
        starves = a.waited_s >= STARVING_S
        first = (-a.priority, -a.request_priority, a.is_extra, not starves)
        if starves or a.slo_ttft_s is None or left < a.start_s or a.share_s - least > LEAD_S:
            return (*first, True, False, a.share_s, -a.waited_s * max(1, a.requests), a.model, a.request_id)
        return (*first, False, a.model in book and a.model not in high, left, 0.0, a.model, a.request_id)

    return sorted(asks, key=place)


def _compute_seconds_left(ask: Ask) -> float:
    """Return the seconds until the first token is due."""
    return ask.deadline_s if ask.deadline_s is not None else (ask.slo_ttft_s or 0.0) - ask.waited_s


def clear(ask: Ask, device: DeviceView, short: int, now: float) -> Clearance | None:
    """Return idle victims, or serving ones if these do not suffice."""
    idle: list[Resident] = []
    serving: list[Resident] = []
    for r in device.residents:
        if not r.protected_reason and r.model != ask.model and r.state != "leaving":
            (serving if r.state == "serving" else idle).append(r)
    if (taken := _choose_cheapest(idle, short)) is not None:
        return _clearance("evict", taken, sum([_loss(r) for r in taken]))
    return _plan_moves(idle, serving, short) or _plan_preemption(ask, idle, serving, short)


def _loss(r: Resident) -> float:
    """Return the expected cost of eviction in seconds (Tangram, Eq. 2).

    A start for parking costs nothing, nor does one of several replicas (Torpor §5.3: one replica
    per model while memory is full). The delay of its requests counts, not the load time: 0
    if they execute while the bytes arrive (a light model of Torpor's). All requests that arrive
    until the model is back are delayed, so that a popular model costs more than a rare one even if
    both are certain to be used.
    """
    if r.state == "starting" or r.replicas > 1:
        return 0.0
    return (
        (r.miss_probability if r.reuse_probability is None else r.reuse_probability)
        * total_delay_s(_return_s(r), r.requests_per_s)
        * r.sensitivity
    )


def _return_s(r: Resident) -> float:
    """Return the seconds by which eviction delays the model's next request."""
    return r.reload_s if r.delay_s is None else r.delay_s


def _choose_cheapest(idle: list[Resident], short: int) -> list[Resident] | None:
    """Return the cheapest victims that free enough: by cost per byte without surplus, or a single
    one.
    """
    if sum([r.nbytes for r in idle]) < short:
        return None
    ordered = sorted(idle, key=lambda r: (_loss(r) / max(1, r.nbytes), r.replicas == 1, r.last_used, r.key))
    taken: list[Resident] = []
    freed = 0
    for r in ordered:
        if freed >= short:
            break
        taken.append(r)
        freed += r.nbytes
    if len(taken) == 1:
        return taken
    for r in reversed(taken[:-1]):
        if freed - r.nbytes >= short:
            taken.remove(r)
            freed -= r.nbytes
    alone = min((r for r in idle if r.nbytes >= short), key=lambda r: (_loss(r), r.last_used, r.key), default=None)
    if alone is not None and _loss(alone) <= sum(_loss(r) for r in taken):
        return [alone]
    return taken


def _clearance(how: Clearing, taken: Sequence[Resident], penalty: float) -> Clearance:
    return Clearance(how, tuple([r.key for r in taken]), sum([r.nbytes for r in taken]), penalty_s=penalty)


def _plan_moves(idle: list[Resident], serving: list[Resident], short: int) -> Clearance | None:
    """Return serving victims to migrate and idle ones to evict, with the least total time."""
    leaving = [EvictionCandidate(r.key, r.nbytes, r.last_used, unload_s=_loss(r)) for r in idle]
    moving = [EvictionCandidate(r.key, r.nbytes, r.last_used, r.moves) for r in serving if r.moves]
    found = least_time([*leaving, *moving], short) if moving else None
    if found is None:
        return None
    moves = {key: to for key, to in found.moves if to}
    queues: dict[str, float] = {}
    for v in moving:
        for m in v.moves:
            if moves.get(v.key) == m.device:  # loads of one node run one after another, those of several nodes in parallel
                queues[m.node] = queues.get(m.node, 0.0) + m.total_s
    keys = tuple(k for k, _ in found.moves)
    return Clearance(
        "migrate" if moves else "evict", keys, found.freed, max(queues.values(), default=0.0), penalty_s=found.seconds, moves=moves
    )


def _plan_preemption(ask: Ask, idle: list[Resident], serving: list[Resident], short: int) -> Clearance | None:
    """Return victims to preempt or drain, if that is cheaper than waiting for their requests.

    Between equal priorities preemption only changes who waits, so that the new request must also be
    shorter than what is left of the victim's.
    """
    worth = []
    for r in serving:
        instead = ask.exec_s if r.priority >= ask.priority else 0.0
        if not r.remaining_s or r.remaining_s > _return_s(r) + (r.resume_s or 0.0) + instead:
            worth.append(r)
    if not worth:
        return None
    first = sorted(idle, key=lambda r: (_loss(r), r.last_used, r.key))
    then = sorted(worth, key=lambda r: (r.priority, r.active + r.queued, r.ready_at, r.key))
    taken: list[Resident] = []
    freed = 0
    for r in (*first, *then):
        if freed >= short:
            break
        taken.append(r)
        freed += r.nbytes
    if freed < short:
        return None
    for r in reversed(taken[:-1]):
        if freed - r.nbytes >= short:
            taken.remove(r)
            freed -= r.nbytes
    lost = sum([_loss(r) if r.state != "serving" else (_return_s(r) + (r.resume_s or 0.0)) * r.sensitivity for r in taken])
    return _clearance("preempt", taken, lost)


def choose(ask: Ask, options: Sequence[Option], seed: str) -> Option | None:
    return min(options, key=lambda o: _preference(ask, o), default=None)


def _preference(ask: Ask, o: Option) -> tuple[object, ...]:
    at = o.devices[0]
    failed = at.has_failed or (len(o.devices) > 1 and any(d.has_failed for d in o.devices))
    slow = ask.slo_tpot_s is not None and o.tpot_s > ask.slo_tpot_s
    own, theirs = _estimate_shared_delay(ask, o)
    n = max(1, ask.requests)
    loss = (o.clearance.penalty_s + theirs) / n + own * (n + 1) / 2  # prompts are computed one after another
    if at.neighbour_loads == "heavy":
        loss += o.cost.phases.get("load", 0.0)
    first = 0.0 if o.cost.phases.get("prefill") else ask.exec_s
    in_time = ask.slo_ttft_s is not None and o.cost.total_s + first + own <= _compute_seconds_left(ask)
    return (
        failed,
        o.clearance.how == "preempt",
        slow,
        not in_time,
        at.kv_lacking_bytes > 0 and in_time,  # its pages would be taken from caches that lack some
        o.cost.total_s + loss,
        o.cost.total_s,
        at.kv_lacking_bytes,
        o.way != "ready",
        -o.resident_bytes,
        o.sharing,
        o.clearance.freed_bytes,
        o.free_bytes if o.sharing else -o.free_bytes,
        o.key,
    )


def _estimate_shared_delay(ask: Ask, o: Option) -> tuple[float, float]:
    """Return the delay of its first token by shared compute, and the delay that it causes.

    Busy instances of a device compute in turns of equal time. Each one is delayed by what the new
    one computes until it is done itself, and so are all of its requests, running and waiting.
    """
    alone = o.cost.phases.get("prefill") or ask.exec_s
    if not alone or o.way == "ready" or len(o.devices) > 1:
        return 0.0, 0.0
    busy = [r for r in o.devices[0].residents if r.active and r.key not in o.clearance.victims]
    if not busy:
        return 0.0, 0.0
    work_s = (ask.exec_s or alone) * max(1, ask.requests)
    return alone * len(busy), sum([min(r.remaining_s, work_s) * max(1, r.active + r.queued) for r in busy])


def keep(keep_alive: float, load_s: float) -> float:
    """Keep as the model's setting says."""
    return keep_alive


def scale(demand: Demand) -> int:
    """Return the replica target.

    One instance while requests wait; more if waiting and running requests, with the expected ones
    for batching engines, exceed their capacity. With one request per instance, an instance for an
    expected request would displace one for a waiting request.
    """
    wanted = demand.live
    if demand.waiting:
        needed = demand.waiting + demand.running + (predict_requests(demand) if demand.capacity > 1 else 0)
        wanted = max(1, wanted, -(-needed // max(1, demand.capacity)))
    return clamp_replicas(demand, wanted)


PROFILE = Profile(
    "thaw",
    order=order,
    clear=clear,
    choose=choose,
    keep=keep,
    scale=scale,
    uses=frozenset({"sleep", "suspend", "reuse", "peer_copy", "pipeline", "preempt", "migrate", "template"}),
    slo_queue=True,
    about="Thaw's own policy: the least total time under the cost model.",
)
