"""Named profiles: what `scheduler.policy` of thaw.yaml and `--policy` of `thaw simulate` may say."""

from __future__ import annotations

from services.scheduler.domain.policies import baselines, hydraserve, serverlessllm, shepherd, swapservellm, tangram, thaw, torpor
from services.scheduler.domain.policies.port import Profile
from shared.errors import InvalidRequest

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


def profile_named(name: str) -> Profile:
    """Raises `InvalidRequest` that lists the names there are."""
    try:
        return PROFILES[name]
    except KeyError:
        raise InvalidRequest(f"there is no scheduling policy {name!r}; there are {', '.join(sorted(PROFILES))}") from None
