"""The mesh's own policy.

- Order: priority, then those that nobody serves before replicas more, then who has waited longest.
- Who leaves: what is started to be parked, then the longest idle, then what suspended ones have left, by bytes; those that turn out not to be
  needed are let off, most recently used first. Only if that is not enough, those that serve: low priority first, then the shortest queue, then
  the longest ready.
- Which option: room as it is, then room that is coming, then room of idle ones, then of serving ones; of one kind not where it has just
  failed, then the soonest ready, then the fewest bytes evicted. A suspended instance competes by time, unless somebody who serves would have
  to go for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from services.scheduler.domain.policies.port import Ask, Clearance, Demand, DeviceView, Option, Profile, Resident, Usage

_KINDS = {"none": 4, "leaving": 5, "evict": 6, "suspend": 6, "preempt": 7, "migrate": 7}
_BACK = ("wake", "restore", "ready")


def order(asks: Sequence[Ask], book: Mapping[str, Usage], alpha: float) -> list[Ask]:
    """Higher priority first, replicas more last, then who has waited longest."""
    return sorted(asks, key=lambda a: (-a.priority, a.extra, -a.waited, a.model, a.request_id))


def clear(ask: Ask, device: DeviceView, short: int, now: float) -> Clearance | None:
    """Those that serve nobody, else also those that do."""
    free_to_go = [r for r in device.residents if not r.protected and r.model != ask.model]
    idle = sorted((r for r in free_to_go if r.state != "serving"), key=_idle_order)
    if (taken := _taken(idle, short)) is not None:
        return _clearance("evict", taken)
    serving = sorted((r for r in free_to_go if r.state == "serving"), key=_serving_order)
    taken = _taken([*idle, *serving], short) if serving else None
    return None if taken is None else _clearance("preempt", taken)


def _taken(ordered: list[Resident], short: int) -> list[Resident] | None:
    taken: list[Resident] = []
    freed = 0
    for r in ordered:
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
    return taken


def _clearance(how: str, taken: list[Resident]) -> Clearance:
    return Clearance("preempt" if how == "preempt" else "evict", tuple(r.key for r in taken), sum(r.nbytes for r in taken))


def _idle_order(r: Resident) -> tuple[int, float, str]:
    kind = 0 if r.state == "starting" else 1 if r.state == "idle" else 2
    return (kind, r.last_used, r.key)


def _serving_order(r: Resident) -> tuple[int, int, float, str]:
    return (r.priority, r.active + r.queued, r.ready_at, r.key)


def choose(ask: Ask, options: Sequence[Option], seed: str) -> Option | None:
    return min(options, key=_preference, default=None)


def _preference(o: Option) -> tuple[object, ...]:
    kind = _KINDS[o.clearance.how]
    idle = min((r.last_used for d in o.devices for r in d.residents if not r.protected), default=0.0) if kind > 5 else 0.0
    kind = 4 if o.way in _BACK and kind < 7 else kind
    return (kind, any(d.failed for d in o.devices), o.cost.total, o.clearance.freed, idle, o.free, o.key)


def keep(keep_alive: float, load_s: float) -> float:
    """As the model says."""
    return keep_alive


def scale(demand: Demand) -> int:
    """One while anybody waits; one more when more is asked for than those there can run at once."""
    wanted = demand.live
    if demand.live == 0:
        wanted = 1 if demand.waiting else 0
    elif demand.waiting + demand.running > demand.live * demand.capacity:
        wanted = demand.live + 1
    return max(demand.minimum, min(demand.maximum, wanted))


PROFILE = Profile(
    "thaw",
    order=order,
    clear=clear,
    choose=choose,
    keep=keep,
    scale=scale,
    uses=frozenset({"sleep", "suspend", "reuse", "peer_copy", "pipeline", "preempt", "migrate"}),
    about="Thaw's own: every way there is, the soonest for the system under the cost model.",
)
