"""Sums of metered usage by API key and model, which the metrics read when they are exported.

Adding to an OpenTelemetry counter takes some five microseconds, and a request would need several.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from opentelemetry.metrics import CallbackOptions, Meter, Observation
from opentelemetry.util.types import AttributeValue

from services.gateway.domain.usage_records import UsageRecord

_Attributes = dict[str, AttributeValue]


@dataclass(slots=True)
class _Sums:
    """The usage of one model by one key since the gateway started."""

    requests: int = 0
    cold_requests: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    compute_us: dict[str, int] = field(default_factory=dict)


class KeyUsage:
    """Count what the ledger records, by key and model; LoRA adapters are models of their own."""

    def __init__(self, meter: Meter) -> None:
        """Export the counters `thaw.key.*` with `meter`."""
        self._sums: dict[tuple[str, str], _Sums] = {}
        for name, unit, description, read in (
            ("thaw.key.requests", "{request}", "Metered requests, by API key and model.", _requests),
            ("thaw.key.tokens", "{token}", "Metered tokens, by API key, model and type.", _tokens),
            ("thaw.key.compute", "s", "Device time of metered requests, by API key, model and thaw.device.kind.", _compute),
            (
                "thaw.key.cold_requests",
                "{request}",
                "Metered requests that waited for a cold start, by API key and model.",
                _cold_requests,
            ),
        ):
            meter.create_observable_counter(name, [self._observer(read)], unit, description)

    def add(self, records: Iterable[UsageRecord]) -> None:
        """Count finished requests. Many at once take less time than one by one."""
        for record in records:
            self._count(record)

    def _count(self, record: UsageRecord) -> None:
        name = (record.key, record.adapter or record.model)
        sums = self._sums.get(name)
        if sums is None:
            sums = self._sums[name] = _Sums()
        sums.requests += 1
        sums.prompt_tokens += record.prompt_tokens
        sums.completion_tokens += record.completion_tokens
        if record.compute_us:
            sums.compute_us[record.compute_kind] = sums.compute_us.get(record.compute_kind, 0) + record.compute_us
        if record.plan_id is not None:
            sums.cold_requests += 1

    def _observer(
        self, read: Callable[[_Sums], Iterable[tuple[float, _Attributes]]]
    ) -> Callable[[CallbackOptions], Iterable[Observation]]:
        def observe(_: CallbackOptions) -> Iterable[Observation]:
            for (key, model), sums in self._sums.items():
                names: _Attributes = {"thaw.key": key, "gen_ai.request.model": model}
                for value, more in read(sums):
                    yield Observation(value, names | more)

        return observe


def _requests(sums: _Sums) -> Iterable[tuple[float, _Attributes]]:
    yield sums.requests, {}


def _cold_requests(sums: _Sums) -> Iterable[tuple[float, _Attributes]]:
    if sums.cold_requests:
        yield sums.cold_requests, {}


def _tokens(sums: _Sums) -> Iterable[tuple[float, _Attributes]]:
    for kind, tokens in (("input", sums.prompt_tokens), ("output", sums.completion_tokens)):
        if tokens:
            yield tokens, {"gen_ai.token.type": kind}


def _compute(sums: _Sums) -> Iterable[tuple[float, _Attributes]]:
    for kind, microseconds in sums.compute_us.items():
        yield microseconds / 1e6, {"thaw.device.kind": kind}
