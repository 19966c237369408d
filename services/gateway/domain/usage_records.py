"""Records of finished requests, and their form in a spool."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from pydantic_core import from_json, to_json

from shared.contracts.usage import MAX_HOUR, MAX_NAME_CHARACTERS

_MAX_TOKENS = 1 << 31
"""Maximum of one request. The sums of a report stay far below `MAX_COUNT`."""

_MAX_KIND_CHARACTERS = 20
_MAX_DEVICES = 10_000
_MAX_COMPUTE_US = 1 << 42
"""Maximum of one request: 50 days of a device."""
_CHECKED_NAMES = 4_096
"""Names that were checked recently: lines repeat them."""


@dataclass(slots=True)
class UsageRecord:
    """The usage of one request, with fields as in `UsageRow` and `ColdWait`.

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
        """Encode the record as one line of a spool, a JSON array."""
        first = _encode_names(self.hour, self.key, self.model, self.adapter)
        counts = (self.failed, self.prompt_tokens, self.cached_tokens, self.completion_tokens)
        if self.answer_id or self.plan_id is not None:
            more: list[Any] = [self.plan_id, round(self.start_s, 3), self.device_kind, self.devices]
            if self.compute_us or self.answer_id:
                more += (self.compute_us, self.compute_kind)
                if self.answer_id:
                    more.append(self.answer_id)
            return b"%b%d,%d,%d,%d,%b\n" % (first, *counts, to_json(more)[1:])
        if self.compute_us:
            return b'%b%d,%d,%d,%d,null,0.0,"",1,%d,%b]\n' % (first, *counts, self.compute_us, _encode_kind(self.compute_kind))
        return b"%b%d,%d,%d,%d]\n" % (first, *counts)

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
            return record if record.is_storable() else None
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

    def is_storable(self) -> bool:
        """True if a report and PostgreSQL take the record."""
        return (
            0 <= self.hour <= MAX_HOUR
            and self.has_storable_counts()
            and math.isfinite(self.start_s)
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

    def has_storable_counts(self) -> bool:
        """True if the ledger takes the record's tokens and device time."""
        return (
            self.prompt_tokens <= _MAX_TOKENS
            and self.cached_tokens <= _MAX_TOKENS
            and self.completion_tokens <= _MAX_TOKENS
            and self.compute_us <= _MAX_COMPUTE_US
        )


@lru_cache(_CHECKED_NAMES)
def _encode_names(hour: int, key: str, model: str, adapter: str) -> bytes:
    """Return how a line begins: encoding names takes longer than the rest of a line."""
    return to_json([hour, key, model, adapter])[:-1] + b","


@lru_cache
def _encode_kind(kind: str) -> bytes:
    return to_json(kind)


@lru_cache(_CHECKED_NAMES)
def _is_storable_name(name: str) -> bool:
    return len(name) <= MAX_NAME_CHARACTERS and "\0" not in name
