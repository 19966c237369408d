"""Records of finished requests, and their sums by hour, key, model and LoRA adapter."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from pydantic_core import from_json, to_json

from shared.contracts.usage import (
    MAX_HOUR,
    MAX_NAME_CHARACTERS,
    MAX_ROWS_PER_REPORT,
    ColdWait,
    Counts,
    ReportUsage,
    ResponseUsage,
    UsageRow,
)

_MAX_TOKENS = 1 << 31
"""Of one request; the sums of a report stay far below `MAX_COUNT`."""

_MAX_KIND_CHARACTERS = 20
_MAX_DEVICES = 10_000
_MAX_COMPUTE_US = 1 << 42
"""Of one request: 50 days of a device."""
_SETTLED = "settled"
_CHECKED_NAMES = 4_096
"""Names that were checked recently: lines repeat them."""
_RowName = tuple[int, str, str, str]
"""Hour, key, model and adapter."""
_WaitName = tuple[str, str, str, str]
"""Plan, key, model and adapter."""


@dataclass(slots=True)
class UsageRecord:
    """What one request used; fields as in `UsageRow` and `ColdWait`.

    Not frozen: to create a frozen one takes eight times as long, and each request needs two.

    Attributes:
        compute_us: Microseconds that devices computed for it, times the devices of the instance.
        compute_kind: Kind of these devices (cpu, cuda); empty: not measured.
        plan_id: Plan of the cold start that it waited for; None: none.
        device_kind: Kind of the devices of that start (cpu, cuda).
        devices: How many they are.
        answer_id: Id of a response with an Idempotency-Key, which another gateway may record as
            well; empty: none can.
    """

    hour: int
    key: str
    model: str
    adapter: str
    failed: bool
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    plan_id: str | None = None
    start_s: float = 0.0
    device_kind: str = ""
    devices: int = 1
    compute_us: int = 0
    compute_kind: str = ""
    answer_id: str = ""

    def line(self) -> bytes:
        """Encode the record as one line of a spool."""
        fields: list[Any] = [
            self.hour,
            self.key,
            self.model,
            self.adapter,
            1 if self.failed else 0,
            self.prompt_tokens,
            self.cached_tokens,
            self.completion_tokens,
        ]
        if self.compute_us or self.answer_id or self.plan_id is not None:
            fields += (self.plan_id, round(self.start_s, 3), self.device_kind, self.devices)
            if self.compute_us or self.answer_id:
                fields += (self.compute_us, self.compute_kind)
                if self.answer_id:
                    fields.append(self.answer_id)
        return to_json(fields) + b"\n"

    @classmethod
    def parse(cls, line: bytes) -> UsageRecord | None:
        """Decode a line; None if it is damaged, as the last line after a power cut may be.

        A damaged line never becomes a record that the ledger would refuse: it would keep all
        records behind it from being reported.
        """
        try:
            hour, key, model, adapter, failed, prompt, cached, completion, *cold = from_json(line)
            record = cls(
                int(hour),
                str(key),
                str(model),
                str(adapter),
                bool(failed),
                max(0, int(prompt)),
                max(0, int(cached)),
                max(0, int(completion)),
            )
            if cold:
                record._set_cold(*cold)
            return record if record._is_storable() else None
        except (ValueError, TypeError, OverflowError):
            return None

    def _set_cold(
        self,
        plan_id: Any,
        start_s: Any = 0.0,
        device_kind: Any = "",
        devices: Any = 1,
        compute_us: Any = 0,
        compute_kind: Any = "",
        answer_id: Any = "",
    ) -> None:
        """Set what not every line has. A gateway of an earlier version wrote two or four fields."""
        self.plan_id = None if plan_id is None else str(plan_id)
        self.start_s = max(0.0, float(start_s))
        self.device_kind = str(device_kind)
        self.devices = int(devices)
        self.compute_us = max(0, int(compute_us))
        self.compute_kind = str(compute_kind)
        self.answer_id = str(answer_id)

    def _is_storable(self) -> bool:
        """True if a report and PostgreSQL take the record."""
        return (
            0 <= self.hour <= MAX_HOUR
            and self.prompt_tokens <= _MAX_TOKENS
            and self.cached_tokens <= _MAX_TOKENS
            and self.completion_tokens <= _MAX_TOKENS
            and math.isfinite(self.start_s)
            and self.compute_us <= _MAX_COMPUTE_US
            and len(self.device_kind) <= _MAX_KIND_CHARACTERS
            and 1 <= self.devices <= _MAX_DEVICES
            and _is_storable_name(self.key)
            and _is_storable_name(self.model)
            and _is_storable_name(self.adapter)
            and (self.plan_id is None or _is_storable_name(self.plan_id))
            and _is_storable_name(self.device_kind)
            and _is_storable_name(self.compute_kind)
            and (not self.answer_id or _is_storable_name(self.answer_id))
        )


@lru_cache(_CHECKED_NAMES)
def _is_storable_name(name: str) -> bool:
    return len(name) <= MAX_NAME_CHARACTERS and "\0" not in name


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

    A record of a response with an Idempotency-Key is reported by itself until it is settled.

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
        record = UsageRecord.parse(line)
        if record is not None and not report.add(record, is_settled=record.answer_id in settled):
            break
        end += len(line)
    if not end:
        return None
    return ReportUsage(
        spool=spool,
        start=start,
        end=start + end,
        rows=tuple(_row(name, sums) for name, sums in report.rows.items()),
        waits=tuple(_wait(name, wait) for name, wait in report.waits.items()),
        responses=tuple(report.responses),
    )


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

    def _sum_up(self, record: UsageRecord) -> bool:
        name = (record.hour, record.key, record.model, record.adapter)
        sums = self.rows.get(name)
        if sums is None:
            if len(self.rows) >= MAX_ROWS_PER_REPORT:
                return False
            sums = [0] * 8
        if record.plan_id is not None and not self._add_wait(record.plan_id, record):
            return False
        self.rows[name] = sums
        sums[0] += 1
        sums[1] += record.failed
        sums[2] += record.prompt_tokens
        sums[3] += record.cached_tokens
        sums[4] += record.completion_tokens
        sums[5] += record.plan_id is not None
        if record.compute_kind == "cpu":
            sums[6] += record.compute_us
        elif record.compute_kind == "cuda":
            sums[7] += record.compute_us
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
