"""The papers' scheduling policies, and the baselines that the papers compare with."""

from __future__ import annotations

from services.scheduler.domain.policies import thaw
from services.scheduler.domain.policies.port import Profile
from simulator.policies import baselines, hydraserve, serverlessllm, shepherd, swapservellm, tangram, torpor

PROFILES: dict[str, Profile] = {
    p.name: p
    for p in (
        thaw.PROFILE,
        serverlessllm.PROFILE,
        shepherd.PROFILE,
        baselines.RANDOM,
        swapservellm.PROFILE,
        torpor.PROFILE,
        tangram.PROFILE,
        hydraserve.PROFILE,
        baselines.LRU,
        baselines.FIFO,
        baselines.NATIVE,
        baselines.INFLESS_KA,
        baselines.KEEP_ALIVE,
        baselines.SIMPLE_SWAP,
    )
}
"""Every policy by name, Thaw's own first."""
