"""Baselines of the papers: ServerlessLLM §7.3 and §7.4, Torpor §7.3 and §7.4.

Ray Serve with an SSD cache is keep-alive on machines with an SSD cache, and NonSwap is native with
a smaller footprint: both differ in the simulated machine, not in the policy.
"""

from __future__ import annotations

from collections.abc import Sequence

from services.scheduler.domain.policies.common import (
    arrivals,
    evict_lru,
    evict_none,
    in_order,
    keep_load_time,
    keep_setting,
    keep_until_needed,
    list_inactive,
    one_each,
    per_request,
)
from services.scheduler.domain.policies.port import Ask, Clearance, DeviceView, Option, Profile, draw_number
from shared.percentiles import percentile


def any_device(ask: Ask, options: Sequence[Option], seed: str) -> Option | None:
    """Choose any available GPU at random.

    This is the "de-facto serverless scheduler" of ServerlessLLM §7.3. It draws from the devices, so
    that a device with two options is not twice as likely, and takes the device's fastest option.
    """
    devices = sorted({o.key for o in options})
    if not devices:
        return None
    device = devices[int(draw_number(seed, ask.model, ask.request_id) * len(devices))]
    return min((o for o in options if o.key == device), key=lambda o: (o.cost.total_s, o.way))


def first_fit(ask: Ask, options: Sequence[Option], seed: str) -> Option | None:
    """Choose the first device with room, else the first with victims."""
    return min(options, key=lambda o: (o.way != "ready", o.clearance.how not in ("none", "leaving"), o.key), default=None)


def bind_early(ask: Ask, options: Sequence[Option], seed: str) -> Option | None:
    """Bind early (Torpor §2.2): one instance per model.

    It goes to the device with the most free memory.
    """
    ready = [o for o in options if o.way == "ready"]
    if ready or ask.is_extra:
        return min(ready, key=lambda o: o.key, default=None)
    return min(options, key=lambda o: (-o.free_bytes, o.key), default=None)


def least_recently_used(ask: Ask, options: Sequence[Option], seed: str) -> Option | None:
    """Choose the most free memory, else the device whose victims are the oldest.

    Their age is the time since their last use.
    """

    def place(o: Option) -> tuple[bool, bool, float, tuple[str, ...]]:
        victims_used_at = [r.last_used for d in o.devices for r in d.residents if r.key in o.clearance.victims]
        return (o.way != "ready", bool(victims_used_at), max(victims_used_at, default=-o.free_bytes), o.key)

    return min(options, key=place, default=None)


def evict_first_in(ask: Ask, device: DeviceView, short: int, now: float) -> Clearance | None:
    """Evict idle instances, first loaded first."""
    return in_order(sorted(list_inactive(device, ask.model), key=lambda r: (r.ready_at, r.key)), short)


def infless_keep(short_term: Sequence[float], long_term: Sequence[float], default: float, share: float = 0.5) -> float:
    """INFless-KA's keep-alive in seconds (Torpor §7.3).

    "A function keep-alive policy to set the lifespan of individual functions based on historical
    traces"; Torpor gives no more detail. Here it is a weighted mean of the 99th percentiles of a
    short and of a long history.

    Args:
        short_term: Idle times between the latest requests, in seconds.
        long_term: The same over a longer time.
        default: Returned without a history.
        share: Weight of the long history.
    """
    tails = [percentile(t, 99) for t in (long_term, short_term) if t]
    if not tails:
        return default
    return tails[0] if len(tails) == 1 else share * tails[0] + (1 - share) * tails[1]


RANDOM = Profile(
    "serverless-random",
    order=arrivals,
    clear=evict_lru,
    choose=any_device,
    keep=keep_load_time,
    scale=per_request,
    about="Any available device, drawn at random (the serverless scheduler of ServerlessLLM, section 7.3).",
)
LRU = Profile(
    "lru",
    order=arrivals,
    clear=evict_lru,
    choose=least_recently_used,
    keep=keep_setting,
    scale=one_each,
    about="First fit, else least recently used eviction.",
)
FIFO = Profile(
    "fifo",
    order=arrivals,
    clear=evict_first_in,
    choose=first_fit,
    keep=keep_setting,
    scale=one_each,
    about="First come, first served; evicts in order of loading.",
)
NATIVE = Profile(
    "native",
    order=arrivals,
    clear=evict_none,
    choose=bind_early,
    keep=keep_until_needed,
    scale=one_each,
    about="Early binding: an instance stays on its device permanently (Native and NonSwap of Torpor, section 7).",
)
INFLESS_KA = Profile(
    "infless-ka",
    order=arrivals,
    clear=evict_none,
    choose=bind_early,
    keep=keep_setting,
    scale=one_each,
    about="Early binding until a function's keep-alive, set from its past, ends (INFless-KA of Torpor, section 7.3; see infless_keep).",
)
KEEP_ALIVE = Profile(
    "keep-alive",
    order=arrivals,
    clear=evict_none,
    choose=any_device,
    keep=keep_load_time,
    scale=per_request,
    about="Instances stop after an idle time equal to their load time (Ray Serve of ServerlessLLM, section 7.4).",
)
SIMPLE_SWAP = Profile(
    "simple-swap",
    order=arrivals,
    clear=evict_lru,
    choose=any_device,
    keep=keep_until_needed,
    scale=one_each,
    uses=frozenset({"reuse"}),
    about="Torpor's swapping with arrival order, random devices and least recently used eviction (SimpleSwap of Torpor, section 7.4).",
)
