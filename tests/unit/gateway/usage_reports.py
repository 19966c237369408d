"""Random usage records, and the ledger's rules for reports of them."""

from __future__ import annotations

from hypothesis import strategies as st

from services.gateway.domain.usage_records import UsageRecord
from shared.contracts.usage import ReportUsage

RECORDS = st.builds(
    UsageRecord,
    hour=st.integers(0, 3),
    key=st.sampled_from(["", "a", "b"]),
    model=st.sampled_from(["m", "n,é\n"]),
    adapter=st.sampled_from(["", "x"]),
    failed=st.booleans(),
    prompt_tokens=st.integers(0, 1000),
    cached_tokens=st.integers(0, 1000),
    completion_tokens=st.integers(0, 1000),
    plan_id=st.sampled_from([None, "p1", "p2"]),
    start_s=st.just(2.5),
    compute_us=st.integers(0, 1000),
    compute_kind=st.sampled_from(["cpu", "cuda"]),
)


class FakeLedger:
    """The ledger's rules: a report continues its spool, and responses with an id count once."""

    def __init__(self) -> None:
        self.positions: dict[str, int] = {}
        self.responses: set[str] = set()
        self.requests = self.tokens = self.waits = self.cpu_us = self.cuda_us = 0

    def record(self, report: ReportUsage) -> int:
        position = self.positions.setdefault(report.spool, 0)
        if position != report.start:
            return position
        self.positions[report.spool] = report.end
        new = [r for r in report.responses if r.answer_id not in self.responses]
        self.responses |= {r.answer_id for r in new}
        rows = [*report.rows, *(r.row for r in new)]
        self.requests += sum(r.counts.requests for r in rows)
        self.tokens += sum(r.counts.prompt_tokens + r.counts.completion_tokens for r in rows)
        self.waits += sum(w.requests for w in (*report.waits, *(r.wait for r in new if r.wait is not None)))
        self.cpu_us += sum(r.counts.compute_cpu_us for r in rows)
        self.cuda_us += sum(r.counts.compute_cuda_us for r in rows)
        return report.end
