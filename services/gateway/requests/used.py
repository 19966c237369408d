"""The usage of a finished request, for the ledger."""

from __future__ import annotations

import time
from functools import lru_cache

from services.gateway.domain.followed_usage import FollowedResponse, FollowedUsage
from services.gateway.domain.open_usage import OpenUsage
from services.gateway.domain.usage_records import UsageRecord
from services.gateway.requests.active_request import ActiveRequest
from services.gateway.requests.stats import RequestStats
from shared.contracts.node import InstanceStatus


def usage_record(request: ActiveRequest, key: str) -> UsageRecord | None:
    """Return the record of a finished request.

    Args:
        key: Name of its API key.

    Returns:
        None if no engine worked on it, or another gateway records it: one that generates the
        response for the same Idempotency-Key, or that continues it.
    """
    answer_id = request.idempotency.metered_as if request.idempotency is not None else ""
    if answer_id is None or not (request.ticket.attempts or request.response.is_replay):
        return None
    return _record(request, key, answer_id, request.stats.instance)


def followed_usage(request: ActiveRequest, key: str, response: FollowedResponse, served: InstanceStatus | None) -> FollowedUsage:
    """Return what a followed response used, in case no other gateway records it.

    Args:
        key: Name of the API key.
        served: The instance that generated the response, if it is known.
    """
    record = _record(request, key, response.answer_id, served)
    return FollowedUsage(request.ticket.id, response.key, response.reply, response.messages, record)


def _record(request: ActiveRequest, key: str, answer_id: str, served: InstanceStatus | None) -> UsageRecord:
    completion, stats, adapter = request.completion, request.stats, request.engine_request.lora_adapter
    usage = stats.usage
    record = UsageRecord(
        int(time.time()) // 3600,
        key,
        request.ticket.model,
        adapter.name if adapter is not None else "",
        completion.error is not None or completion.has_client_left,
        usage.prompt_tokens,
        usage.cached_tokens,
        max(usage.completion_tokens, request.resume_state.tokens),
    )
    if answer_id:
        record.answer_id = answer_id
    if served is not None:
        device_s = stats.earlier_device_s + request.reader.attempt.device_s
        if device_s and served.device_ids:
            record.compute_kind = _kind_of(served.device_ids)
            devices = served.device_count if served.group is not None else len(served.device_ids)
            record.compute_us = round(device_s * devices * 1e6)
        if stats.cold_ready_at is not None:
            _add_cold_start(record, stats, served)
    return record


def open_usage(request: ActiveRequest, key: str) -> OpenUsage | None:
    """Return the device time of an open request so far; None: it has used none.

    A request with an Idempotency-Key has none here: the gateway that takes over its key records all
    of it.

    Args:
        key: Name of its API key.
    """
    served, adapter = request.stats.instance, request.engine_request.lora_adapter
    kind = _kind_of(served.device_ids) if served is not None else ""
    compute_s = request.stats.earlier_device_s + request.attempt.device_s
    if served is None or not kind or not compute_s or request.completion.is_done or request.idempotency is not None:
        return None
    name, us = adapter.name if adapter is not None else "", round(compute_s * served.device_count * 1e6)
    return OpenUsage(request.ticket.id, int(time.time() // 3600), key, request.ticket.model, name, us, kind)


def _add_cold_start(record: UsageRecord, stats: RequestStats, served: InstanceStatus) -> None:
    """Add the cold start that the request waited for."""
    spans = [span for report in stats.phase_reports if report.received_at == stats.cold_ready_at for span in report.phases]
    record.plan_id = served.plan_id
    record.start_s = max((-span.start_ms for span in spans), default=0.0) / 1e3
    record.device_kind, record.devices = _kind_of(served.device_ids), served.device_count


@lru_cache
def _kind_of(device_ids: tuple[str, ...]) -> str:
    """Return the kind of an instance's devices (cpu, cuda); empty without one."""
    return device_ids[0].partition(":")[0] if device_ids else ""
