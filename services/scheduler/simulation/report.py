"""What came of a simulation: figures for people and for JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Served:
    """`queued`: seconds until an engine took it. `ttft` in seconds, `tpot` in seconds for each further token."""

    model: str
    at: float
    queued: float
    ttft: float
    tpot: float
    in_time: bool


@dataclass
class Outcome:
    served: list[Served] = field(default_factory=list)
    failed: int = 0
    """Told that they cannot be served."""
    lost: int = 0
    """Neither served nor told: a fault of the simulation or of the scheduler."""
    loads: dict[str, int] = field(default_factory=dict)
    startup: list[float] = field(default_factory=list)
    stops: int = 0
    decisions: int = 0
    device_seconds: float = 0.0
    device_memory_gb_seconds: float = 0.0
    prediction_errors: list[float] = field(default_factory=list)
    """Measured minus predicted, in seconds, of each start."""

    def figures(self) -> dict[str, Any]:
        ttft = sorted(s.ttft for s in self.served)
        tpot = sorted(s.tpot for s in self.served)
        errors = sorted(abs(e) for e in self.prediction_errors)
        total = len(self.served) + self.failed + self.lost
        return {
            "requests": total,
            "failed": self.failed,
            "lost": self.lost,
            "ttft": {f"p{p}": rounded(percentile(ttft, p)) for p in (50, 95, 99)} | {"mean": rounded(mean(ttft))},
            "tpot": {f"p{p}": rounded(percentile(tpot, p)) for p in (50, 95, 99)},
            "slo_attainment": rounded(sum(s.in_time for s in self.served) / total if total else None),
            "loads": {tier: self.loads.get(tier, 0) for tier in ("dram", "ssd", "remote")},
            "startup_mean": rounded(mean(self.startup)),
            "stops": self.stops,
            "device_seconds": rounded(self.device_seconds),
            "device_memory_gb_seconds": rounded(self.device_memory_gb_seconds),
            "prediction_error_p50": rounded(percentile(errors, 50)),
            "decisions": self.decisions,
        }


def percentile(ordered: Sequence[float], p: float) -> float | None:
    """The nearest rank; None of nothing."""
    return ordered[min(len(ordered) - 1, int(len(ordered) * p / 100))] if ordered else None


def mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 6)
