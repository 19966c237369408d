"""SwapServeLLM §3.5: demand-aware preemption.

Backends with the shortest request queue are suspended first, of those the least recently used, one
after another until the reservation fits. Beyond the paper: pinned ones are never suspended, and a
backend finishes its requests first (the paper freezes it).
"""

from __future__ import annotations

from services.scheduler.domain.policies.common import (
    arrivals,
    choose_soonest,
    in_order,
    keep_until_needed,
    list_inactive,
    list_movable,
    one_each,
)
from services.scheduler.domain.policies.port import Ask, Clearance, DeviceView, Profile


def clear(ask: Ask, device: DeviceView, short: int, now: float) -> Clearance | None:
    """Suspend victims to host memory, after their requests, which run one after another."""
    running = sorted(
        [*list_inactive(device, ask.model), *list_movable(device, ask.model)],
        key=lambda r: (r.queued + r.active, r.last_used, r.key),
    )
    found = in_order(running, short, "suspend")
    if found is None:
        return None
    left = sum(r.remaining_s for r in running if r.key in found.victims)
    return Clearance(found.how, found.victims, found.freed_bytes, left, found.penalty_s)


PROFILE = Profile(
    "swapservellm",
    order=arrivals,
    clear=clear,
    choose=choose_soonest,
    keep=keep_until_needed,
    scale=one_each,
    uses=frozenset({"sleep", "suspend"}),
    about="Hot swap: engines are suspended to host memory, the shortest queue first, then least recently used (SwapServeLLM, section 3.5).",
)
