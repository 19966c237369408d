"""HydraServe's policy: pipeline-parallel cold starts within both objectives (§4 and §6).

Algorithm 1 with Eq. 1, 2 and 5 is the live scheduler's (`policies/pipelines.py`). Contention (Eq.
3, 4) is in `hydraserve_ledger`, the autoscaler in `autoscaling`.
"""

from __future__ import annotations

from collections.abc import Sequence

from services.scheduler.domain.policies.autoscaling import groups, scale
from services.scheduler.domain.policies.common import arrivals, evict_lru, keep_setting
from services.scheduler.domain.policies.port import Ask, Option, Profile


def choose(ask: Ask, options: Sequence[Option], seed: str) -> Option | None:
    """Choose as Algorithm 1 does, with `cost.total_s` as TTFT and `tpot_s` as TPOT.

    A ready or suspended instance is an option of one stage, and is taken before sharing is
    compared. If the model lacks several instances, the pipeline has as many stages, full workers
    all of them, which become instances of their own (§6.1); fewer where that is not within the
    objectives (artifact, algs.py: `ours`).
    """
    if ready := [o for o in options if o.way == "ready"]:
        return min(ready, key=lambda o: (o.cost.total_s, o.key))
    limit, step = ask.slo_ttft_s, ask.slo_tpot_s
    within = [o for o in options if (limit is None or o.cost.total_s <= limit) and (step is None or o.tpot_s <= step)]
    for size in range(groups(ask.missing_workers)[0], 0, -1):
        large = [o for o in within if o.stages >= size and (size == 1 or o.full_workers >= size)]
        if large:
            return min(
                large, key=lambda o: (o.sharing, o.full_workers + (o.stages - o.full_workers) / o.stages, o.cost.total_s, o.key)
            )
    alone = [o for o in options if (o.stages, o.full_workers) == (1, 1)]
    return min(alone, key=lambda o: (o.cost.total_s, o.clearance.penalty_s, o.key), default=None)


PROFILE = Profile(
    "hydraserve",
    order=arrivals,
    clear=evict_lru,
    choose=choose,
    keep=keep_setting,
    scale=scale,
    uses=frozenset({"pipeline"}),
    about="Pipeline-parallel cold starts within both objectives, and a sliding-window autoscaler (HydraServe, sections 4 and 6).",
)
