"""Tangram §3.4 (Algorithm 2, affinity scheduling) and §3.2.2 stage 1 (minimal-cost eviction). Stage 2, packing: `tangram_packing`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from services.scheduler.domain.policies.common import arrivals, in_order, inactive, keep_load_time, per_request
from services.scheduler.domain.policies.port import Ask, Clearance, DeviceView, Option, Profile, Resident


def choose(ask: Ask, options: Sequence[Option], seed: str) -> Option | None:
    """Lines 3 to 10 of Algorithm 2 for one request: the least estimated load time (S - S') / B over the devices that can run it. The first of
    equals is taken, as there."""
    return min(options, key=lambda o: (o.cost.total_s, o.key), default=None)


def schedule(asks: Sequence[Ask], options: Mapping[str, Sequence[Option]]) -> list[tuple[Ask, Option]]:
    """Algorithm 2 whole: requests in their order, each with its best device, which is then no longer available (line 13). `options` by the
    asking model; a request that no device is left for is not in the answer and stays queued."""
    taken: set[str] = set()
    chosen = []
    for ask in asks:
        free = [o for o in options.get(ask.model, ()) if taken.isdisjoint(o.key)]
        if (best := choose(ask, free, "")) is not None:
            chosen.append((ask, best))
            taken.update(best.key)
    return chosen


def eviction_cost(r: Resident) -> float:
    """Eq. 2: c = p · (s / b) · alpha: how likely it is missed, the seconds to load it again, and what a second of its model counts."""
    return r.miss_probability * r.reload_s * r.sensitivity


def clear(ask: Ask, device: DeviceView, short: int, now: float) -> Clearance | None:
    """§3.2.2 stage 1: what is inactive leaves in ascending cost, until the released size is enough. Active models are never touched."""
    victims = sorted(inactive(device, ask.model), key=lambda r: (eviction_cost(r), r.last_used, r.key))
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
