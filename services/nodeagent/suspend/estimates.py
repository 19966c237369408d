"""Measured cost of a suspend method on this node.

It estimates the cost for other engines.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

WEIGHT_OF_NEWEST = 0.3


@dataclass(frozen=True)
class SuspendEstimates:
    """Moving averages of one method.

    Args:
        left: Share of an engine's memory that stays in use.
        resume_bytes_per_s: Snapshot bytes restored per second.
        least_resume_s: Fixed part of a resume in seconds.
    """

    left: float
    resume_bytes_per_s: float
    least_resume_s: float

    def resume_s(self, snapshot_bytes: int) -> float:
        return self.least_resume_s + snapshot_bytes / self.resume_bytes_per_s

    def learn_suspended(self, used: int, left: int) -> SuspendEstimates:
        return replace(self, left=_move_towards(self.left, left / used)) if used else self

    def learn_resumed(self, snapshot_bytes: int, took_s: float) -> SuspendEstimates:
        if snapshot_bytes <= 0 or took_s <= 0:
            return self
        return replace(self, resume_bytes_per_s=_move_towards(self.resume_bytes_per_s, snapshot_bytes / took_s))


def _move_towards(old: float, new: float) -> float:
    return old + WEIGHT_OF_NEWEST * (new - old)
