"""ServerlessLLM §6: the server with the least estimated start-up time.

`choose_soonest` over the options is §6.3's "the one offering the lowest estimated startup time". An
option costs q + n/b (§6.1), including the time of a migration. The victims come from the knapsack
of §6.2 (`policies/knapsack.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

from services.scheduler.domain.policies.common import (
    arrivals,
    choose_soonest,
    keep_load_time,
    list_inactive,
    list_movable,
    per_request,
)
from services.scheduler.domain.policies.knapsack import EvictionCandidate, least_time
from services.scheduler.domain.policies.port import Ask, Clearance, DeviceView, Option, Profile


def clear(ask: Ask, device: DeviceView, short: int, now: float) -> Clearance | None:
    """Unload idle instances and migrate serving ones, in the least total time.

    Loads on one node run one after another, those of several nodes in parallel: the memory is free
    after the longest queue. The penalty is the total time.
    """
    idle = [EvictionCandidate(r.key, r.nbytes, r.last_used, unload_s=0.0) for r in list_inactive(device, ask.model)]
    serving = [EvictionCandidate(r.key, r.nbytes, r.last_used, r.moves) for r in list_movable(device, ask.model)]
    found = least_time([*idle, *serving], short)
    if found is None:
        return None
    moves = {key: to for key, to in found.moves if to}
    seconds = {(v.key, m.device): (m.node, m.total_s) for v in serving for m in v.moves}
    queues: dict[str, float] = {}
    for pair in moves.items():
        node, took = seconds[pair]
        queues[node] = queues.get(node, 0.0) + took
    delay = max(queues.values(), default=0.0)
    return Clearance(
        "migrate" if moves else "evict", tuple(k for k, _ in found.moves), found.freed, delay, penalty_s=found.seconds, moves=moves
    )


def choose(ask: Ask, options: Sequence[Option], seed: str) -> Option | None:
    """Choose the option with the least estimated start-up time (§6.3).

    None: the load is pending.
    """
    return choose_soonest(ask, options, seed)


PROFILE = Profile(
    "serverlessllm",
    order=arrivals,
    clear=clear,
    choose=choose,
    keep=keep_load_time,
    scale=per_request,
    uses=frozenset({"migrate"}),
    about="Least estimated startup time, with migration of serving instances (ServerlessLLM, section 6).",
)
