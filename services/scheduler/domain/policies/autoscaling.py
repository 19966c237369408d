"""HydraServe §6.1: the sliding-window autoscaler, the groups of a surge, and what becomes of them.

"The number of requests received in the previous window is recorded and used to predict the maximum
number of requests likely to arrive in the next window. The required number of workers is then
determined based on the current waiting queue length combined with the predicted maximum." The paper
does not state the window; the published code (LLMServe/hydraserve,
scripts/kubernetes/vllm/src/scheduler.py, autoscaling_time_window) has 1 second.
"""

from __future__ import annotations

from services.scheduler.domain.policies.common import clamp_replicas
from services.scheduler.domain.policies.port import Demand

WINDOW_S = 1.0
GROUP = 4
"""Workers of one pipeline at most (§4.1)."""


def predict_requests(demand: Demand) -> int:
    """Return the requests of the next window at most: of the last, or of the fullest recent one."""
    return max(demand.window_requests, demand.peak_requests)


def scale(demand: Demand) -> int:
    """Return the instances for waiting, running and expected requests.

    Without demand none are added or removed: instances stop by their keep-alive.
    """
    if not demand.waiting:
        return clamp_replicas(demand, demand.live)
    needed = -(-(demand.waiting + demand.running + predict_requests(demand)) // max(1, demand.capacity))
    return clamp_replicas(demand, max(demand.live, needed))


def needed_workers(demand: Demand) -> int:
    """Return the whole instances that groups become, for waiting, running and expected requests."""
    return -(-(demand.waiting + max(demand.running, predict_requests(demand))) // max(1, demand.capacity))


def share_requests(left: int, served: int, workers: int, own: int) -> int:
    """Return how many requests of a group one of its successors takes (at least 1).

    Args:
        left: Requests that the group still has.
        served: Requests of all successors.
        workers: Successors that are ready.
        own: Requests of this successor.
    """
    return max(1, -(-(left + served) // max(1, workers)) - own)


def groups(workers: int, stages: int = 1) -> list[int]:
    """Return the sizes of the pipelines in which `workers` new instances start.

    "No smaller than the required number of new workers", several for a surge.

    Args:
        workers: New instances.
        stages: The stages that Algorithm 1 chooses for one pipeline.
    """
    sizes = []
    while workers > 0:
        size = min(GROUP, max(stages, workers))
        sizes.append(size)
        workers -= size
    return sizes
