"""Shepherd*, as ServerlessLLM §7.3 makes it: ServerlessLLM's placement and loading time estimation, with preemption in place of migration.

"In principle, Shepherd* and ServerlessLLM will choose the same GPU. However, Shepherd* will continue to rely on preemption." A victim is
unloaded at once and begins again elsewhere: nothing delays the one that comes, and what was computed is lost. Which ones are preempted is
not stated; ours are those that lose the least time together (`reload_s`, and the time to compute again what they had), by the same recurrence
as `serverlessllm.least_time`.
"""

from __future__ import annotations

from collections.abc import Sequence

from services.scheduler.domain.policies.common import arrivals, inactive, keep_load_time, movable, per_request, soonest
from services.scheduler.domain.policies.port import Ask, Clearance, DeviceView, Option, Profile
from services.scheduler.domain.policies.serverlessllm import Departure, least_time


def clear(ask: Ask, device: DeviceView, short: int, now: float) -> Clearance | None:
    """Those that serve nobody are unloaded; those that serve are interrupted, the least lost time first."""
    idle = [Departure(r.key, r.nbytes, r.last_used, unload_s=0.0) for r in inactive(device, ask.model)]
    serving = {
        r.key: Departure(r.key, r.nbytes, r.last_used, unload_s=r.reload_s + (r.resume_s or 0.0))
        for r in movable(device, ask.model)
    }
    found = least_time([*idle, *serving.values()], short)
    if found is None:
        return None
    victims = tuple(key for key, _ in found.moves)
    interrupted = any(key in serving for key in victims)
    return Clearance("preempt" if interrupted else "evict", victims, found.freed, penalty=found.seconds)


def choose(ask: Ask, options: Sequence[Option], seed: str) -> Option | None:
    """The least estimated startup time, as ServerlessLLM; of equals the one that interrupts least."""
    return soonest(ask, options, seed)


PROFILE = Profile(
    "shepherd",
    order=arrivals,
    clear=clear,
    choose=choose,
    keep=keep_load_time,
    scale=per_request,
    uses=frozenset({"preempt"}),
    about="ServerlessLLM's placement with preemption in place of migration (Shepherd*, ServerlessLLM section 7.3).",
)
