"""A ledger of the usage that gateways report."""

from __future__ import annotations

from shared.contracts.base import Message
from shared.contracts.usage import ReportUsage, UsageRecorded, UsageRow


class Ledger:
    """The ledger's rules: a report continues its spool, and responses with an id count once."""

    def __init__(self) -> None:
        self.rows: list[UsageRow] = []
        self.alone: list[str] = []
        """Ids of responses that were reported by themselves."""
        self._positions: dict[str, int] = {}

    async def record(self, report: ReportUsage) -> Message:
        if self._positions.get(report.spool, 0) == report.start:
            self._positions[report.spool] = report.end
            self.rows += report.rows
            self.rows += [r.row for r in report.responses if r.answer_id not in self.alone]
            self.alone += [r.answer_id for r in report.responses]
        return UsageRecorded(position=self._positions[report.spool])

    async def counted(self, requests: int) -> bool:
        return sum(row.counts.requests for row in self.rows) == requests

    @property
    def tokens(self) -> int:
        return sum(row.counts.completion_tokens for row in self.rows)

    @property
    def failed(self) -> int:
        return sum(row.counts.failed for row in self.rows)
