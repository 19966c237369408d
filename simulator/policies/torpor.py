"""Implement Torpor's interference-aware scheduling (§5.3) and eviction (§5.4).

The former is Algorithm 1. A device executes one request at a time (§4.5).
"""

from __future__ import annotations

from collections.abc import Sequence

from services.scheduler.domain.policies.common import in_order, keep_until_needed, list_inactive, one_each
from services.scheduler.domain.policies.port import Ask, Clearance, DeviceView, Option, Profile, Resident, draw_number
from services.scheduler.domain.policies.torpor_queue import order


def choose(ask: Ask, options: Sequence[Option], seed: str) -> Option | None:
    """Algorithm 1, with A the devices that execute nothing.

    1. The model is on a device of A: execute there (line 8). Of several, one is drawn, since the
       paper does not say which.
    2. It is on busy devices only: the pair with the fastest link, copied device to device (line
       11).
    3. It is on none: from host memory, to a device of A
       a. whose neighbour is not loading (line 13), else
       b. whose neighbour loads a light model (line 15), else
       c. any (line 17); of several the one with the cheapest victims, then the most free memory.
    4. A is empty: the request is queued.
    """
    available = [o for o in options if not any(d.running for d in o.devices)]
    if here := [o for o in available if o.way == "ready"]:
        return sorted(here, key=lambda o: o.key)[int(draw_number(seed, ask.model) * len(here))]
    if copies := [o for o in available if o.way == "peer_copy"]:
        return min(copies, key=lambda o: (o.cost.total_s, o.clearance.penalty_s, o.key))
    for quiet in (("none",), ("none", "light"), ("none", "light", "heavy")):
        if from_host := [o for o in available if all(d.neighbour_loads in quiet for d in o.devices)]:
            return min(from_host, key=lambda o: (o.clearance.penalty_s, -o.free_bytes, o.key))
    return None


def clear(ask: Ask, device: DeviceView, short: int, now: float) -> Clearance | None:
    """Choose victims (§5.4): second replicas, then light and heavy models, by LRU.

    The penalty is the slowdown by swapping them in again: a heavy model's `reload_s`, 0 for others.
    Nothing is written back, since host memory has a copy (§4.3).
    """
    victims = sorted(list_inactive(device, ask.model), key=lambda r: (_class(r), r.last_used, r.key))
    return in_order(victims, short, penalties={r.key: r.reload_s if _class(r) == 2 else 0.0 for r in victims})


def _class(r: Resident) -> int:
    return 0 if r.replicas > 1 else 2 if r.is_heavy else 1


PROFILE = Profile(
    "torpor",
    order=order,
    clear=clear,
    choose=choose,
    keep=keep_until_needed,
    scale=one_each,
    uses=frozenset({"peer_copy", "reuse"}),
    slo_queue=True,
    about="Late binding with interference-aware swapping and SLO-aware queueing (Torpor, section 5).",
)
