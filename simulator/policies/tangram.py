"""Implement Tangram's affinity scheduling (§3.4) and minimal-cost eviction.

The former is Algorithm 2, the latter stage 1 of §3.2.2. Stage 2, packing, is in `tangram_packing`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from services.scheduler.domain.policies.common import arrivals, in_order, keep_load_time, list_inactive, per_request
from services.scheduler.domain.policies.port import Ask, Clearance, DeviceView, Option, Profile, Resident


def choose(ask: Ask, options: Sequence[Option], seed: str) -> Option | None:
    """Choose the least load time (S - S') / B, the first of equals (Algorithm 2).

    These are lines 3 to 10.
    """
    return min(options, key=lambda o: (o.cost.total_s, o.key), default=None)


def schedule(asks: Sequence[Ask], options: Mapping[str, Sequence[Option]]) -> list[tuple[Ask, Option]]:
    """Run Algorithm 2: requests in order, each with its best device.

    That device is then unavailable. A request without a device is not in the result and stays
    queued.

    Args:
        options: Options by model.
    """
    taken: set[str] = set()
    chosen = []
    for ask in asks:
        free = [o for o in options.get(ask.model, ()) if taken.isdisjoint(o.key)]
        if (best := choose(ask, free, "")) is not None:
            chosen.append((ask, best))
            taken.update(best.key)
    return chosen


def eviction_cost(r: Resident) -> float:
    """Return Eq. 2, c = p · (s / b) · alpha.

    The factors are miss probability, reload seconds, and weight.
    """
    return r.miss_probability * r.reload_s * r.sensitivity


def clear(ask: Ask, device: DeviceView, short: int, now: float) -> Clearance | None:
    """Evict inactive models in ascending cost until enough is free (§3.2.2, stage 1)."""
    victims = sorted(list_inactive(device, ask.model), key=lambda r: (eviction_cost(r), r.last_used, r.key))
    return in_order(victims, short, penalties={r.key: eviction_cost(r) for r in victims})


PROFILE = Profile(
    "tangram",
    order=arrivals,
    clear=clear,
    choose=choose,
    keep=keep_load_time,
    scale=per_request,
    uses=frozenset({"reuse"}),
    about="Affinity to the tensors that are resident, and eviction by expected reload cost (Tangram, section 3).",
)
