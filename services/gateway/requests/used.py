"""What a finished request used, for the ledger."""

from __future__ import annotations

import time

from services.gateway.domain.usage_records import UsageRecord
from services.gateway.requests.active_request import ActiveRequest


def usage_record(request: ActiveRequest, key: str) -> UsageRecord | None:
    """Return the record of a finished request.

    Args:
        key: Name of its API key.

    Returns:
        None if no engine worked on it, or another gateway records it: one that generates the
        response for the same Idempotency-Key, or that continues it.
    """
    ticket, completion, stats = request.ticket, request.completion, request.stats
    answer_id = request.idempotency.metered_as if request.idempotency is not None else ""
    if answer_id is None or not (ticket.attempts or request.response.is_replay):
        return None
    adapter = request.engine_request.lora_adapter
    cold_at = stats.cold_ready_at
    spans = [s for report in stats.phase_reports if cold_at is not None and report.received_at == cold_at for s in report.phases]
    served = stats.instance
    started = served if cold_at is not None else None
    kind = served.device_ids[0].partition(":")[0] if served is not None and served.device_ids else ""
    count = served.device_count if served is not None else 1
    compute_s = (stats.earlier_device_s + request.attempt.device_s) * count
    return UsageRecord(
        hour=int(time.time() // 3600),
        key=key,
        model=ticket.model,
        adapter=adapter.name if adapter is not None else "",
        failed=completion.error is not None or completion.has_client_left,
        prompt_tokens=stats.usage.prompt_tokens,
        cached_tokens=stats.usage.cached_tokens,
        completion_tokens=max(stats.usage.completion_tokens, request.resume_state.tokens),
        plan_id=started.plan_id if started is not None else None,
        start_s=max((-span.start_ms for span in spans), default=0.0) / 1e3,
        device_kind=kind if started is not None else "",
        devices=count if started is not None else 1,
        compute_us=round(compute_s * 1e6) if kind else 0,
        compute_kind=kind if compute_s else "",
        answer_id=answer_id,
    )
