"""Compare the ledger's device time with the engines' own meters. Pure.

An engine's meter (`busy_s` of its load) counts the seconds that it computes, apart from what it
charges to requests. A killed engine leaves its meter to its nodeagent, and the ledger charges what
no gateway has recorded to the owners of the models (ADR 0101). So the two may differ by 1 %, and by
a step of each engine that was killed: the engine may end between the writes of its meters.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

TOLERANCE = 0.01
SETTLED = 0.0005
"""A campaign waits for such a difference, as long as it may."""
UNKNOWN_S = 0.1
"""Per engine that was killed: a step."""


@dataclass
class Meters:
    """The latest readings of meters: device-seconds by instance and process."""

    _shown: dict[tuple[str, int], float] = field(default_factory=dict)
    _models: dict[str, str] = field(default_factory=dict)
    _processes: dict[str, int] = field(default_factory=dict)

    def read(self, cluster: Mapping[str, Any]) -> None:
        """Read all meters in a view of the cluster. The meter of a suspended engine shows 0."""
        for instance in (i for node in cluster["nodes"] for i in node["instances"]):
            name = instance["instance_id"]
            if pid := (instance["pids"] or [instance["ended_pid"]])[0]:
                self._processes[name] = pid
            if name in self._processes:
                meter = name, self._processes[name]
                shown = instance["load"]["busy_s"] * max(1, len(instance["device_ids"]))
                self._shown[meter] = max(self._shown.get(meter, 0.0), shown)
                self._models[name] = instance["model"]

    @property
    def total_s(self) -> float:
        return sum(self._shown.values())

    def list_shown(self, model: str) -> dict[str, float]:
        """Return the seconds of each engine of a model, by instance and process."""
        return {f"{name}/{pid}": s for (name, pid), s in self._shown.items() if self._models[name] == model and s}

    @property
    def models(self) -> set[str]:
        return set(self._models.values())


@dataclass(frozen=True)
class DeviceTime:
    """Device-seconds of the ledger and of the meters.

    Attributes:
        background_s: The part of the ledger that is charged to no request.
        unknown_s: Of engines that were killed.
        models: A line for each model: its part of both, and its engines.
    """

    ledger_s: float = 0.0
    metered_s: float = 0.0
    background_s: float = 0.0
    unknown_s: float = 0.0
    models: tuple[str, ...] = ()

    @property
    def least_s(self) -> float:
        return max(0.0, self.metered_s * (1 - TOLERANCE) - self.unknown_s)

    @property
    def most_s(self) -> float:
        return self.metered_s * (1 + TOLERANCE) + self.unknown_s

    @property
    def is_settled(self) -> bool:
        """False while the ledger waits for gateways to record what engines have charged."""
        return abs(self.ledger_s - self.metered_s) <= SETTLED * self.metered_s

    def find_fault(self) -> str | None:
        """Return in words that the ledger is outside the bounds; None: it is not."""
        if self.least_s <= self.ledger_s <= self.most_s:
            return None
        return f"{self.ledger_s:.2f} s of devices in the ledger, not {self.least_s:.2f} to {self.most_s:.2f}"


def measure(meters: Meters, rows: Iterable[Mapping[str, Any]], killed: int) -> DeviceTime:
    """Put the ledger beside the meters.

    Args:
        rows: Of `/admin/v1/usage` by model, all of them.
        killed: Engines, and processes whose end ends an engine, that were killed.
    """
    of_model: defaultdict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for row in rows:
        of_model[row["model"]][0] += (row["counts"]["compute_cpu_us"] + row["counts"]["compute_cuda_us"]) / 1e6
        of_model[row["model"]][1] += row["counts"]["background_s"]
    lines = []
    for model in sorted({*of_model, *meters.models}):
        engines = meters.list_shown(model)
        ledger_s, background_s = of_model[model]
        if ledger_s or engines:
            each = ", ".join(f"{name} {seconds:.2f}" for name, seconds in engines.items())
            difference = ledger_s - sum(engines.values())
            lines.append(f"{model}: {ledger_s:.2f} s, {background_s:.2f} s of it for no request, {difference:+.3f} s; {each}")
    total_s, background_s = (sum(found[n] for found in of_model.values()) for n in (0, 1))
    return DeviceTime(total_s, meters.total_s, background_s, killed * UNKNOWN_S, tuple(lines))
