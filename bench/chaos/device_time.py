"""Compare the ledger's device time with the engines' own meters. Pure.

An engine's meter (`busy_s` of its load) counts the seconds that it computes, apart from what it
charges to requests. A meter ends with its process: what counts is what its nodeagent reported last.
The two may differ by 1 %, and by what no process can know:

- A killed engine has worked since its last report, and its requests may lack their last seconds.
- A killed NATS takes messages that engines have sent: a request that another engine continues lacks
  the device time that they reported.
- A killed gateway takes the device time of its open requests with it. That is at most what all
  engines computed while the client sent such a request and repeated it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

TOLERANCE = 0.01
UNKNOWN_S = 2.0
"""Per engine or NATS that was killed: a second between reports, half a second between looks, and a
step.
"""
_AFTER_S = 2.0
"""How long an engine may continue a request whose gateway and client have gone."""


@dataclass
class Meters:
    """What meters showed: device-seconds by instance and process, and their sum at each look."""

    _shown: dict[tuple[str, int], float] = field(default_factory=dict)
    _processes: dict[str, int] = field(default_factory=dict)
    _looks: list[tuple[float, float]] = field(default_factory=list)

    def look(self, cluster: Mapping[str, Any], now: float) -> None:
        """Read all meters in a view of the cluster.

        The meter of a suspended engine shows 0, and that of an ended one has no process.
        """
        for instance in (i for node in cluster["nodes"] for i in node["instances"]):
            name = instance["instance_id"]
            if instance["pids"]:
                self._processes[name] = instance["pids"][0]
            if name in self._processes:
                meter = name, self._processes[name]
                shown = instance["load"]["busy_s"] * max(1, len(instance["device_ids"]))
                self._shown[meter] = max(self._shown.get(meter, 0.0), shown)
        self._looks.append((now, self.total_s))

    @property
    def total_s(self) -> float:
        return sum(self._shown.values())

    def sum_within(self, intervals: Iterable[tuple[float, float]]) -> float:
        """Return at least the seconds that were computed within any of the intervals."""
        found, until = 0.0, 0.0
        for start, end in sorted(intervals):
            begin = max(start, until)
            if end > begin:
                found += self._read_after(end) - self._read_before(begin)
                until = end
        return found

    def _read_before(self, at: float) -> float:
        return next((shown for seen, shown in reversed(self._looks) if seen <= at), 0.0)

    def _read_after(self, at: float) -> float:
        return next((shown for seen, shown in self._looks if seen >= at), self.total_s)


@dataclass(frozen=True)
class DeviceTime:
    """Device-seconds of the ledger and of the meters.

    Attributes:
        unknown_s: Of engines and NATS servers that were killed.
        lost_s: At most what gateways that were struck have taken with them.
    """

    ledger_s: float = 0.0
    metered_s: float = 0.0
    unknown_s: float = 0.0
    lost_s: float = 0.0

    @property
    def least_s(self) -> float:
        return max(0.0, self.metered_s * (1 - TOLERANCE) - self.unknown_s - self.lost_s)

    @property
    def most_s(self) -> float:
        return self.metered_s * (1 + TOLERANCE) + self.unknown_s

    def find_fault(self) -> str | None:
        """Return in words that the ledger is outside the bounds; None: it is not."""
        if self.least_s <= self.ledger_s <= self.most_s:
            return None
        return f"{self.ledger_s:.2f} s of devices in the ledger, not {self.least_s:.2f} to {self.most_s:.2f}"


def measure(
    meters: Meters, rows: Iterable[Mapping[str, Any]], killed: int, open_requests: Iterable[tuple[float, float]]
) -> DeviceTime:
    """Put the ledger beside the meters.

    Args:
        rows: Of `/admin/v1/usage`, all of them.
        killed: Engines, processes whose end ends an engine, and NATS servers that were killed.
        open_requests: When requests were sent and answered that were open at a gateway that was
            struck.
    """
    ledger_us = sum(row["counts"]["compute_cpu_us"] + row["counts"]["compute_cuda_us"] for row in rows)
    lost_s = meters.sum_within((sent, ended + _AFTER_S) for sent, ended in open_requests)
    return DeviceTime(ledger_us / 1e6, meters.total_s, killed * UNKNOWN_S, lost_s)
