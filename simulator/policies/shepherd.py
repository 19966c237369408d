"""Shepherd*, as ServerlessLLM §7.3 makes it: ServerlessLLM's placement and loading time estimation, with preemption in place of migration.

"In principle, Shepherd* and ServerlessLLM will choose the same GPU. However, Shepherd* will continue to rely on preemption." A victim is
unloaded at once and begins again where there is room (§5.1: it "identifies that Server 1 is free and reinitiates Model A there"): nothing delays the
one that comes, and what was computed is lost. So the victims are those that ServerlessLLM would move, by `serverlessllm.least_time`; one that has
nowhere to begin again is not interrupted, else two could interrupt each other for ever.
"""

from __future__ import annotations

from collections.abc import Sequence

from services.scheduler.domain.policies.common import arrivals, keep_load_time, per_request, soonest
from services.scheduler.domain.policies.port import Ask, Clearance, DeviceView, Option, Profile
from simulator.policies import serverlessllm


def clear(ask: Ask, device: DeviceView, short: int, now: float) -> Clearance | None:
    """Those that serve nobody are unloaded; of those that serve, whoever would move soonest is interrupted. The penalty is what moving would take."""
    found = serverlessllm.clear(ask, device, short, now)
    if found is None or found.how == "evict":
        return found
    return Clearance("preempt", found.victims, found.freed_bytes, penalty_s=found.penalty_s)


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
    uses=frozenset({"preempt", "migrate"}),
    about="ServerlessLLM's placement with preemption in place of migration (Shepherd*, ServerlessLLM section 7.3).",
)
