"""Records of finished requests, and their sums by hour, key, model and LoRA adapter."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

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
_RowName = tuple[int, str, str, str]
"""Hour, key, model and adapter."""
_WaitName = tuple[str, str, str, str]
"""Plan, key, model and adapter."""


@dataclass(frozen=True, slots=True)
class UsageRecord:
    """What one request used; fields as in `UsageRow` and `ColdWait`.

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
        fields = [
            self.hour,
            self.key,
            self.model,
            self.adapter,
            int(self.failed),
            self.prompt_tokens,
            self.cached_tokens,
            self.completion_tokens,
        ]
        if self.plan_id is not None or self.compute_us or self.answer_id:
            fields += [self.plan_id, round(self.start_s, 3), self.device_kind, self.devices]
        if self.compute_us or self.answer_id:
            fields += [self.compute_us, self.compute_kind]
        if self.answer_id:
            fields.append(self.answer_id)
        return json.dumps(fields, separators=(",", ":")).encode() + b"\n"

    @classmethod
    def parse(cls, line: bytes) -> UsageRecord | None:
        """Decode a line; None if it is damaged, as the last line after a power cut may be.

        A damaged line never becomes a record that the ledger would refuse: it would keep all
        records behind it from being reported.
        """
        try:
            hour, key, model, adapter, failed, prompt, cached, completion, *cold = json.loads(line)
            # A gateway of an earlier version wrote the first four or six only.
            defaults: list[Any] = [None, 0.0, "", 1, 0, "", ""]
            plan_id, start_s, device_kind, devices, compute_us, compute_kind, answer_id = cold + defaults[len(cold) :]
            record = cls(
                int(hour),
                str(key),
                str(model),
                str(adapter),
                bool(failed),
                max(0, int(prompt)),
                max(0, int(cached)),
                max(0, int(completion)),
                None if plan_id is None else str(plan_id),
                max(0.0, float(start_s)),
                str(device_kind),
                int(devices),
                max(0, int(compute_us)),
                str(compute_kind),
                str(answer_id),
            )
            return record if record._is_storable() else None
        except (ValueError, TypeError, OverflowError):
            return None

    def _is_storable(self) -> bool:
        """True if a report and PostgreSQL take the record.

        Raises:
            UnicodeEncodeError: A name is no Unicode text.
        """
        names = (self.key, self.model, self.adapter, self.plan_id or "", self.device_kind, self.compute_kind, self.answer_id)
        "".join(names).encode()
        return (
            0 <= self.hour <= MAX_HOUR
            and max(self.prompt_tokens, self.cached_tokens, self.completion_tokens) <= _MAX_TOKENS
            and math.isfinite(self.start_s)
            and self.compute_us <= _MAX_COMPUTE_US
            and len(self.device_kind) <= _MAX_KIND_CHARACTERS
            and 1 <= self.devices <= _MAX_DEVICES
            and all(len(name) <= MAX_NAME_CHARACTERS and "\0" not in name for name in names)
        )


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
    return json.dumps({_SETTLED: answer_id}, separators=(",", ":")).encode() + b"\n"


def next_report(spool: str, start: int, data: bytes) -> ReportUsage | None:
    """Sum up the records at the beginning of `data`, as many as one report takes.

    A record of a response with an Idempotency-Key is reported by itself until it is settled.

    Args:
        spool: Name of the file.
        start: Position of `data` in it.

    Returns:
        None if there is no whole line.
    """
    lines = list(_whole_lines(data))
    settled = {answer_id for line in lines if (answer_id := _settled_id(line)) is not None}
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
        cold = (record.plan_id or "", record.key, record.model, record.adapter)
        is_new_wait = record.plan_id is not None and cold not in self.waits
        is_new_row = name not in self.rows
        if (is_new_row and len(self.rows) >= MAX_ROWS_PER_REPORT) or (is_new_wait and len(self.waits) >= MAX_ROWS_PER_REPORT):
            return False
        sums = self.rows.setdefault(name, [0] * 8)
        for i, more in enumerate(
            (
                1,
                int(record.failed),
                record.prompt_tokens,
                record.cached_tokens,
                record.completion_tokens,
                int(record.plan_id is not None),
                record.compute_us if record.compute_kind == "cpu" else 0,
                record.compute_us if record.compute_kind == "cuda" else 0,
            )
        ):
            sums[i] += more
        if record.plan_id is not None:
            wait = self.waits.setdefault(cold, _Wait(record.hour, record.device_kind, record.devices))
            wait.requests += 1
            wait.start_s = max(wait.start_s, record.start_s)
        return True


def _whole_lines(data: bytes) -> Iterable[bytes]:
    return (line for line in data.splitlines(keepends=True) if line.endswith(b"\n"))


def _settled_id(line: bytes) -> str | None:
    if not line.startswith(b"{"):
        return None
    try:
        return str(json.loads(line)[_SETTLED])
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
