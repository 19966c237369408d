"""The papers' formulas as plain arithmetic. Seconds, bytes, bytes per second; phases may be in any unit of time, and their sums are in it.

HydraServe's Eq. 1, 2 and 5 are in policies/hydraserve.py, Eq. 3 and 4 in policies/hydraserve_ledger.py, beside the algorithms that they belong to.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

BEFORE = ("schedule", "reserve")
"""Until the node may begin: the decision, and its victims' leaving."""
BRINGING = ("fetch", "load")
"""The weights' way: from afar to the node, and to where they are computed from. Piece by piece, so that the longer one counts."""
ENGINE = ("container", "context", "libraries")
"""The engine's process is made while weights arrive."""
AFTER = ("init", "compile", "capture", "restore", "profile")
"""What needs both."""


def load_s(nbytes: int, slowest: float, queue_s: float = 0.0) -> float:
    """q + n/b (ServerlessLLM §6.1): `slowest` is the least bandwidth passed on the way, `queue_s` what is queued before it there. With the
    bytes that are not there yet for `nbytes`, (S - S')/B (Tangram §4.4)."""
    return queue_s + nbytes / slowest


def resume_s(tokens_in: float, tokens_out: float, per_token: float, fixed: float) -> float:
    """a·(t_in + t_out) + b (ServerlessLLM §6.2): recomputing the keys and values of that many tokens elsewhere."""
    return per_token * (tokens_in + tokens_out) + fixed


def critical_path(phases: Mapping[str, float]) -> float:
    """From the decision to ready. Phases that overlap count once: weights arrive while the engine's process is made."""
    bringing = max([phases.get(p, 0.0) for p in BRINGING])
    return _sum(phases, BEFORE) + max(bringing, _sum(phases, ENGINE)) + _sum(phases, AFTER)


def critical_phases(phases: Mapping[str, float]) -> tuple[str, ...]:
    """The phases on the critical path."""
    bringing = max(BRINGING, key=lambda p: phases.get(p, 0.0))
    beside = ENGINE if _sum(phases, ENGINE) >= phases.get(bringing, 0.0) else (bringing,)
    return tuple(p for p in (*BEFORE, *beside, *AFTER) if p in phases)


def reuse_odds(unused_s: float, horizon_s: float) -> float:
    """How likely something unused for so long is wanted within the horizon: what has lasted for a time lasts as long again at even odds
    (Gott's rule), so that the odds are horizon : time unused."""
    return horizon_s / (horizon_s + max(0.0, unused_s))


def _sum(phases: Mapping[str, float], names: Iterable[str]) -> float:
    return sum([phases.get(p, 0.0) for p in names])
