"""A ledger that takes every usage report, and gateways' meters that report to it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from services.gateway.adapters.usage_meter import UsageMeter
from services.gateway.domain.usage_records import UsageRecord
from shared.contracts.usage import Counts, ReportUsage, UsageRecorded
from shared.messaging import Mesh

SECOND = 1_000_000
RECORD = UsageRecord(1, "a", "m", "", False, 3, 0, 2, compute_us=5 * SECOND, compute_kind="cpu")


class Ledger:
    """Takes every report."""

    def __init__(self) -> None:
        self.positions: dict[str, int] = {}
        self.counts: list[Counts] = []

    async def request(self, _: str, report: ReportUsage, __: Any) -> UsageRecorded:
        if self.positions.get(report.spool, 0) == report.start:
            self.positions[report.spool] = report.end
            self.counts += [row.counts for row in report.rows]
        return UsageRecorded(position=self.positions[report.spool])

    def sums(self) -> tuple[int, int, int]:
        """Return requests, tokens, and microseconds."""
        found = self.counts
        tokens = sum(c.prompt_tokens + c.completion_tokens for c in found)
        return sum(c.requests for c in found), tokens, sum(c.compute_cpu_us for c in found)


def begin(ledger: Ledger, name: str, directory: Path) -> UsageMeter:
    meter = UsageMeter(cast(Mesh, ledger), name, directory)
    meter.open()
    return meter


def kill(meter: UsageMeter) -> None:
    """Leave the spools as the kernel does when their process is killed."""
    assert meter._own is not None
    for spool in (meter._own, *meter._adopted):
        spool.close()
