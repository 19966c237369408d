"""Place models as Shepherd* of ServerlessLLM §7.3: preemption, not migration.

"In principle, Shepherd* and ServerlessLLM will choose the same GPU. However, Shepherd* will
continue to rely on preemption." A victim is unloaded at once and restarts where there is room
(§5.1), so that nothing delays the new model and the computed tokens are lost. The victims are those
that ServerlessLLM would migrate; a victim without another place is not preempted, or two models
could preempt each other forever.
"""

from __future__ import annotations

from collections.abc import Sequence

from services.scheduler.domain.policies.common import arrivals, choose_soonest, keep_load_time, per_request
from services.scheduler.domain.policies.port import Ask, Clearance, DeviceView, Option, Profile
from simulator.policies import serverlessllm


def clear(ask: Ask, device: DeviceView, short: int, now: float) -> Clearance | None:
    """Unload idle instances and preempt serving ones.

    The penalty is the time of migrating them.
    """
    found = serverlessllm.clear(ask, device, short, now)
    if found is None or found.how == "evict":
        return found
    return Clearance("preempt", found.victims, found.freed_bytes, penalty_s=found.penalty_s)


def choose(ask: Ask, options: Sequence[Option], seed: str) -> Option | None:
    """Choose the least estimated start-up time; of equals the one that preempts least."""
    return choose_soonest(ask, options, seed)


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
