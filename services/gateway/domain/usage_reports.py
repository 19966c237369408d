"""Reports of a spool: sums of its records by hour, key, model and LoRA adapter.

A gateway sums up its own records while it writes them (`RecentUsage`). Records that it cannot have
in memory, such as those of a gateway that ended, are read from their spool (`next_report`).
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass

from pydantic_core import from_json, to_json

from services.gateway.domain.open_usage import parse_lost
from services.gateway.domain.usage_records import UsageRecord
from shared.contracts.usage import MAX_ROWS_PER_REPORT, ColdWait, Counts, ReportUsage, ResponseUsage, UsageRow

_SETTLED = "settled"
_RowName = tuple[int, str, str, str]
"""Hour, key, model and adapter."""
_WaitName = tuple[str, str, str, str]
"""Plan, key, model and adapter."""


@dataclass(slots=True)
class _Wait:
    """Requests of one key that waited for one start."""

    hour: int
    device_kind: str
    devices: int
    requests: int = 0
    start_s: float = 0.0


def settled_line(answer_id: str) -> bytes:
    """Encode that no other gateway will record the usage of a response."""
    return to_json({_SETTLED: answer_id}) + b"\n"


def next_report(spool: str, start: int, data: bytes) -> ReportUsage | None:
    """Sum up the records at the beginning of `data`, as many as one report takes.

    A record of a response with an Idempotency-Key is reported by itself until it is settled. Of
    requests that never ended only the device time counts (`open_usage`).

    Args:
        spool: Name of the file.
        start: Position of `data` in it.

    Returns:
        None if there is no whole line.
    """
    lines = [line for line in data.splitlines(keepends=True) if line.endswith(b"\n")]
    settled = {_settled_id(line) for line in lines if line.startswith(b"{")}
    report = _Report()
    end = 0
    for line in lines:
        if line.startswith(b"{"):
            record = parse_lost(line)
            is_taken = record is None or report.add_lost(record)
        else:
            record = UsageRecord.parse(line)
            is_taken = record is None or report.add(record, is_settled=record.answer_id in settled)
        if not is_taken:
            break
        end += len(line)
    if not end:
        return None
    return report.build(spool, start, start + end)


class RecentUsage:
    """Sums of the records at the end of a spool, so that they need not be read from it.

    Attributes:
        start: Position in the spool from which on all records are in the sums.
    """

    def __init__(self, start: int) -> None:
        self.start = start
        self._sums = _Report()
        self._keyed: list[UsageRecord] = []

    def add(self, record: UsageRecord) -> bool:
        """Add a record that was appended; return False if one report has no room for it."""
        sums = self._sums
        if not record.answer_id and sums.add_to_row(record):
            return True
        if max(len(sums.rows), len(sums.waits)) + len(self._keyed) >= MAX_ROWS_PER_REPORT:
            return False
        if not record.is_storable():
            return True
        if record.answer_id:
            self._keyed.append(record)
            return True
        return sums.add(record, is_settled=True)

    def build(self, spool: str, end: int, unsettled: Container[str]) -> ReportUsage:
        """Return the report of all records, which another object follows.

        Args:
            spool: Name of the file.
            end: Size of the file.
            unsettled: Ids of responses that another gateway may record as well.
        """
        for record in self._keyed:
            self._sums.add(record, is_settled=record.answer_id not in unsettled)
        return self._sums.build(spool, self.start, end)


class _Report:
    """Sums of one report."""

    def __init__(self) -> None:
        self.rows: dict[_RowName, list[int]] = {}
        self.waits: dict[_WaitName, _Wait] = {}
        self.responses: list[ResponseUsage] = []

    def add(self, record: UsageRecord, *, is_settled: bool) -> bool:
        """Add a record; return False if the report is full."""
        if record.answer_id and not is_settled:
            if len(self.responses) >= MAX_ROWS_PER_REPORT:
                return False
            alone = _Report()
            alone._sum_up(record)
            rows = [_row(name, sums) for name, sums in alone.rows.items()]
            waits = [_wait(name, wait) for name, wait in alone.waits.items()]
            self.responses.append(ResponseUsage(answer_id=record.answer_id, row=rows[0], wait=waits[0] if waits else None))
            return True
        return self._sum_up(record)

    def add_to_row(self, record: UsageRecord) -> bool:
        """Add a record without a cold start whose row is there; return False if it is another one.

        The row's names were checked, which takes longer than to add.
        """
        sums = self.rows.get((record.hour, record.key, record.model, record.adapter))
        if sums is None or record.plan_id is not None or not record.has_storable_counts():
            return False
        _add_counts(sums, record)
        return True

    def build(self, spool: str, start: int, end: int) -> ReportUsage:
        """Return the sums as the report of the records from `start` to `end`."""
        return ReportUsage(
            spool=spool,
            start=start,
            end=end,
            rows=tuple(_row(name, sums) for name, sums in self.rows.items()),
            waits=tuple(_wait(name, wait) for name, wait in self.waits.items()),
            responses=tuple(self.responses),
        )

    def add_lost(self, record: UsageRecord) -> bool:
        """Add the device time of a request that never ended; return False if the report is full."""
        return self._sum_up(record, requests=0)

    def _sum_up(self, record: UsageRecord, requests: int = 1) -> bool:
        name = (record.hour, record.key, record.model, record.adapter)
        sums = self.rows.get(name)
        if sums is None:
            if len(self.rows) >= MAX_ROWS_PER_REPORT:
                return False
            sums = [0] * 8
        if record.plan_id is not None and not self._add_wait(record.plan_id, record):
            return False
        self.rows[name] = sums
        _add_counts(sums, record, requests)
        return True

    def _add_wait(self, plan_id: str, record: UsageRecord) -> bool:
        name = (plan_id, record.key, record.model, record.adapter)
        wait = self.waits.get(name)
        if wait is None:
            if len(self.waits) >= MAX_ROWS_PER_REPORT:
                return False
            wait = self.waits[name] = _Wait(record.hour, record.device_kind, record.devices)
        wait.requests += 1
        wait.start_s = max(wait.start_s, record.start_s)
        return True


def _add_counts(sums: list[int], record: UsageRecord, requests: int = 1) -> None:
    sums[0] += requests
    sums[1] += record.failed
    sums[2] += record.prompt_tokens
    sums[3] += record.cached_tokens
    sums[4] += record.completion_tokens
    sums[5] += record.plan_id is not None
    if record.compute_kind == "cpu":
        sums[6] += record.compute_us
    elif record.compute_kind == "cuda":
        sums[7] += record.compute_us


def _settled_id(line: bytes) -> str | None:
    try:
        return str(from_json(line)[_SETTLED])
    except (ValueError, KeyError):
        return None  # damaged


def _row(name: _RowName, sums: list[int]) -> UsageRow:
    hour, key, model, adapter = name
    requests, failed, prompt, cached, completion, cold, cpu_us, cuda_us = sums
    counts = Counts(
        requests=requests,
        failed=failed,
        prompt_tokens=prompt,
        cached_tokens=cached,
        completion_tokens=completion,
        cold_requests=cold,
        compute_cpu_us=cpu_us,
        compute_cuda_us=cuda_us,
    )
    return UsageRow(hour=hour, key=key, model=model, adapter=adapter, counts=counts)


def _wait(name: _WaitName, wait: _Wait) -> ColdWait:
    plan_id, key, model, adapter = name
    return ColdWait(
        plan_id=plan_id,
        hour=wait.hour,
        key=key,
        model=model,
        adapter=adapter,
        requests=wait.requests,
        start_s=wait.start_s,
        device_kind=wait.device_kind,
        devices=wait.devices,
    )
