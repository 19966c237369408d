"""The outcome of a simulation, as text and as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shared.percentiles import percentile

TIERS = ("ready", "snapshot", "peer", "reuse", "dram", "ssd", "remote", "pipeline")


@dataclass(frozen=True, slots=True)
class Served:
    """One served request. All times are in seconds.

    Attributes:
        at: Time of its arrival.
        queued: Until an engine took it.
        tpot: For each further token.
        pause: Interrupted by preemption or migration.
        ended: Time of its last token.
    """

    model: str
    at: float
    queued: float
    ttft: float
    tpot: float
    in_time: bool
    pause: float = 0.0
    ended: float = 0.0
    cold: bool = False
    number: int = -1
    """Index of the request in the list."""

    @property
    def startup(self) -> float:
        """Return the start-up latency including the pause, as in ServerlessLLM §7.1."""
        return self.queued + self.pause


@dataclass
class Outcome:
    served: list[Served] = field(default_factory=list)
    failed: int = 0
    """Requests that were refused."""
    timed_out: int = 0
    """Requests that timed out."""
    lost: int = 0
    """Requests without any result: a fault of the simulation or of the scheduler."""
    given_up: list[tuple[str, float, int]] = field(default_factory=list)
    """Model, arrival and index of the failed and timed-out requests."""
    loads: dict[str, int] = field(default_factory=dict)
    startup: list[float] = field(default_factory=list)
    """Seconds from the decision to ready, of each start."""
    stages: list[int] = field(default_factory=list)
    """Stages of each start; 1: one worker."""
    successors: list[int] = field(default_factory=list)
    """Whole instances that each pipeline became."""
    phases: dict[str, float] = field(default_factory=dict)
    """Seconds by phase, over all starts."""
    stops: int = 0
    decisions: int = 0
    migrations: int = 0
    preemptions: int = 0
    suspensions: int = 0
    restarts: int = 0
    """Requests that a node failure interrupted."""
    device_seconds: float = 0.0
    device_memory_gb_seconds: float = 0.0
    prediction_errors: list[float] = field(default_factory=list)
    """Measured minus predicted seconds of each start."""
    percentiles: Mapping[str, float] = field(default_factory=dict)
    """By model, the share of its requests that must meet their objective."""
    device_loads: dict[str, tuple[float, ...]] = field(default_factory=dict)
    """By node, the busy share of each device."""
    ended_at: float = 0.0
    paths: dict[int, dict[str, float]] = field(default_factory=dict)
    """By request, seconds of its TTFT by phase (the critical path). Only with --mesh."""

    def figures(self) -> dict[str, Any]:
        ttft = sorted(s.ttft for s in self.served)
        tpot = sorted(s.tpot for s in self.served if s.tpot > 0)
        startup = sorted(s.startup for s in self.served)
        pauses = sorted(s.pause for s in self.served if s.pause > 0)
        errors = sorted(abs(e) for e in self.prediction_errors)
        total = len(self.served) + self.failed + self.timed_out + self.lost
        return {
            "requests": total,
            "failed": self.failed,
            "timed_out": self.timed_out,
            "lost": self.lost,
            "cold": sum(s.cold for s in self.served),
            "ttft": spread(ttft),
            "tpot": spread(tpot),
            "slo_attainment": round_value(sum(s.in_time for s in self.served) / total if total else None),
            "loads": {tier: self.loads.get(tier, 0) for tier in TIERS},
            "startup": spread(startup),
            "pause": spread(pauses) | {"requests": len(pauses)},
            "load_mean": round_value(mean(self.startup)),
            "functions": len(self.compliance()),
            "functions_compliant": sum(self.compliance().values()),
            "device_load_variance": round_value(self.load_variance()),
            "migrations": self.migrations,
            "preemptions": self.preemptions,
            "suspensions": self.suspensions,
            "restarts": self.restarts,
            "stops": self.stops,
            "device_seconds": round_value(self.device_seconds),
            "device_memory_seconds": round_value(self.device_memory_gb_seconds),
            "prediction_error_p50": round_value(percentile(errors, 50, default=None)),
            "decisions": self.decisions,
        }

    def compliance(self) -> dict[str, bool]:
        """Return for each requested model whether it complies (Torpor §7)."""
        met: dict[str, int] = {}
        total: dict[str, int] = {}
        for s in self.served:
            total[s.model] = total.get(s.model, 0) + 1
            met[s.model] = met.get(s.model, 0) + s.in_time
        for model, _, _ in self.given_up:
            total[model] = total.get(model, 0) + 1
        return {m: met.get(m, 0) >= self.percentiles.get(m, 0.98) * n for m, n in sorted(total.items())}

    def load_variance(self) -> float | None:
        """Return the nodes' mean variance of relative device load (Torpor §7.4)."""
        found = []
        for loads in self.device_loads.values():
            highest = max(loads, default=0.0)
            if highest > 0 and len(loads) > 1:
                shares = [load / highest for load in loads]
                middle = sum(shares) / len(shares)
                found.append(sum((s - middle) ** 2 for s in shares) / len(shares))
        return mean(found)


def spread(values: Sequence[float]) -> dict[str, float | None]:
    found = {f"p{p}": round_value(percentile(values, p, default=None)) for p in (50, 95, 99)}
    return found | {"mean": round_value(mean(values))}


def mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def round_value(value: float | None) -> float | None:
    return None if value is None else round(value, 6)
