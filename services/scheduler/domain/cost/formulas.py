"""The papers' formulas as arithmetic, in seconds, bytes and bytes per second.

Phases may be in any unit of time; their sums have the same unit. HydraServe's Eq. 1, 2 and 5 are in
services/scheduler/domain/policies/pipelines.py, Eq. 3 and 4 in cost/contention.py (live) and
simulator/policies/hydraserve_ledger.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

BEFORE = ("schedule", "reserve")
"""Phases until the node may begin: the decision, and the eviction of victims."""
BRINGING = ("fetch", "load")
"""Phases of the bytes: from the source to the node, and to the device; the longer one counts."""
ENGINE = ("container", "attach", "context", "libraries")
"""The engine's process starts while weights arrive."""
AFTER = ("init", "compile", "capture", "restore", "profile")
"""Needs both the process and the weights."""
_SHORTEST_INTERVAL_S = 1e-3
"""Bounds the rate of requests that arrived at once."""


def load_s(nbytes: int, slowest: float, queue_s: float = 0.0) -> float:
    """Return q + n/b (ServerlessLLM §6.1), in seconds.

    With the missing bytes as `nbytes` this is (S - S')/B (Tangram §4.4).

    Args:
        nbytes: Bytes to load.
        slowest: The least bandwidth on the way, in bytes per second.
        queue_s: Seconds of loads that are queued before this one.
    """
    return queue_s + nbytes / slowest


def two_way_load_s(nbytes: int, host_rate: float, peer_bytes: int, peer_rate: float, queue_s: float = 0.0) -> tuple[float, float]:
    """Return the seconds of a load over two links at once, and the bytes that the peer link brings.

    Host memory may bring a part of the peer's bytes, so that both links end together.

    Args:
        nbytes: Bytes to load.
        host_rate: Bytes per second by way of host memory, the source included.
        peer_bytes: The part of `nbytes` that other devices of the node have.
        peer_rate: Bytes per second from them.
        queue_s: Seconds before host memory gets its first byte.
    """
    host_only = nbytes - peer_bytes
    host_s = queue_s + host_only / host_rate if host_only else 0.0
    if host_s >= peer_bytes / peer_rate:  # the peers are done first
        return host_s, float(peer_bytes)
    together_s = (nbytes + queue_s * host_rate) / (host_rate + peer_rate)
    seconds = together_s if together_s > queue_s else nbytes / peer_rate
    return seconds, min(float(peer_bytes), seconds * peer_rate)


def resume_s(tokens_in: float, tokens_out: float, per_token: float, fixed: float) -> float:
    """Return a·(t_in + t_out) + b (ServerlessLLM §6.2): seconds to recompute the KV cache
    elsewhere.
    """
    return per_token * (tokens_in + tokens_out) + fixed


def critical_path(phases: Mapping[str, float]) -> float:
    """Return the time from decision to ready; phases that overlap count once."""
    bringing = max([phases.get(p, 0.0) for p in BRINGING])
    return _sum(phases, BEFORE) + max(bringing, _sum(phases, ENGINE)) + _sum(phases, AFTER)


def critical_phases(phases: Mapping[str, float]) -> tuple[str, ...]:
    """Return the phases on the critical path."""
    bringing = max(BRINGING, key=lambda p: phases.get(p, 0.0))
    beside = ENGINE if _sum(phases, ENGINE) >= phases.get(bringing, 0.0) else (bringing,)
    return tuple(p for p in (*BEFORE, *beside, *AFTER) if p in phases)


def reuse_odds(unused_s: float, horizon_s: float) -> float:
    """Return the odds that something unused for `unused_s` is used within the horizon.

    Gott's rule: what has lasted for a time lasts as long again at even odds, so that the odds are
    horizon : time unused.
    """
    return horizon_s / (horizon_s + max(0.0, unused_s))


def request_rate(requests: int, within_s: float, unused_s: float) -> float:
    """Return the expected requests per second of a model.

    Args:
        requests: Requests so far.
        within_s: Seconds in which they arrived.
        unused_s: Seconds since the last one: a model that has been idle for longer than usual is
            expected to stay idle for half of that time (as in `reuse_odds`).
    """
    return 1.0 / max(within_s / requests, unused_s / 2, _SHORTEST_INTERVAL_S) if requests > 0 else 0.0


def total_delay_s(delay_s: float, requests_per_s: float) -> float:
    """Return the seconds that all requests wait for a model that is back after `delay_s`.

    The first one waits for all of it. Those that arrive in the meantime wait for half of it on
    average.
    """
    return delay_s * (1.0 + requests_per_s * delay_s / 2)


def _sum(phases: Mapping[str, float], names: Iterable[str]) -> float:
    return sum([phases.get(p, 0.0) for p in names])
