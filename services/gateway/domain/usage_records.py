"""Records of finished requests, and their sums by hour, key, model and LoRA adapter."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from shared.contracts.usage import MAX_HOUR, MAX_NAME_CHARACTERS, MAX_ROWS_PER_REPORT, ColdWait, Counts, ReportUsage, UsageRow

_MAX_TOKENS = 1 << 31
"""Of one request; the sums of a report stay far below `MAX_COUNT`."""

_MAX_KIND_CHARACTERS = 20
_MAX_DEVICES = 10_000
_MAX_COMPUTE_US = 1 << 42
"""Of one request: 50 days of a device."""


@dataclass(frozen=True, slots=True)
class UsageRecord:
    """What one request used; fields as in `UsageRow` and `ColdWait`.

    Attributes:
        compute_us: Microseconds that devices computed for it, times the devices of the instance.
        compute_kind: Kind of these devices (cpu, cuda); empty: not measured.
        plan_id: Plan of the cold start that it waited for; None: none.
        device_kind: Kind of the devices of that start (cpu, cuda).
        devices: How many they are.
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
        if self.plan_id is not None or self.compute_us:
            fields += [self.plan_id, round(self.start_s, 3), self.device_kind, self.devices]
        if self.compute_us:
            fields += [self.compute_us, self.compute_kind]
        return json.dumps(fields, separators=(",", ":")).encode() + b"\n"

    @classmethod
    def parse(cls, line: bytes) -> UsageRecord | None:
        """Decode a line; None if it is damaged, as the last line after a power cut may be.

        A damaged line never becomes a record that the ledger would refuse: it would keep all
        records behind it from being reported.
        """
        try:
            hour, key, model, adapter, failed, prompt, cached, completion, *cold = json.loads(line)
            # A gateway of an earlier version wrote the first two or four only.
            defaults: list[Any] = [None, 0.0, "", 1, 0, ""]
            plan_id, start_s, device_kind, devices, compute_us, compute_kind = cold + defaults[len(cold) :]
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
            )
            return record if record._is_storable() else None
        except (ValueError, TypeError, OverflowError):
            return None

    def _is_storable(self) -> bool:
        """True if a report and PostgreSQL take the record.

        Raises:
            UnicodeEncodeError: A name is no Unicode text.
        """
        names = (self.key, self.model, self.adapter, self.plan_id or "", self.device_kind, self.compute_kind)
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


def next_report(spool: str, start: int, data: bytes) -> ReportUsage | None:
    """Sum up the records at the beginning of `data`, as many as one report takes.

    Args:
        spool: Name of the file.
        start: Position of `data` in it.

    Returns:
        None if there is no whole line.
    """
    rows: dict[tuple[int, str, str, str], list[int]] = {}
    waits: dict[tuple[str, str, str, str], _Wait] = {}
    end = 0
    for line in _whole_lines(data):
        record = UsageRecord.parse(line)
        if record is not None:
            name = (record.hour, record.key, record.model, record.adapter)
            cold = (record.plan_id or "", record.key, record.model, record.adapter)
            is_new_wait = record.plan_id is not None and cold not in waits
            if (name not in rows and len(rows) >= MAX_ROWS_PER_REPORT) or (is_new_wait and len(waits) >= MAX_ROWS_PER_REPORT):
                break
            sums = rows.setdefault(name, [0] * 8)
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
                wait = waits.setdefault(cold, _Wait(record.hour, record.device_kind, record.devices))
                wait.requests += 1
                wait.start_s = max(wait.start_s, record.start_s)
        end += len(line)
    if not end:
        return None
    return ReportUsage(spool=spool, start=start, end=start + end, rows=tuple(_rows(rows)), waits=tuple(_waits(waits)))


def _whole_lines(data: bytes) -> Iterable[bytes]:
    return (line for line in data.splitlines(keepends=True) if line.endswith(b"\n"))


def _rows(sums: dict[tuple[int, str, str, str], list[int]]) -> Iterable[UsageRow]:
    for (hour, key, model, adapter), (requests, failed, prompt, cached, completion, cold, cpu_us, cuda_us) in sums.items():
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
        yield UsageRow(hour=hour, key=key, model=model, adapter=adapter, counts=counts)


def _waits(waits: dict[tuple[str, str, str, str], _Wait]) -> Iterable[ColdWait]:
    for (plan_id, key, model, adapter), wait in waits.items():
        yield ColdWait(
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
