"""The view of a request that has not ended."""

from __future__ import annotations

from services.gateway.domain.ticket import Stage, Ticket
from services.gateway.requests.active_request import ActiveRequest
from shared.contracts.active_requests import ActiveRequestView


def view_active(request_id: str, request: ActiveRequest) -> ActiveRequestView:
    """Return the view of a request.

    Args:
        request_id: Its id that the client knows.
    """
    ticket, stats = request.ticket, request.stats
    first_token_at = stats.first_token_at
    return ActiveRequestView(
        request_id=request_id,
        model=ticket.model,
        endpoint=request.engine_request.endpoint,
        state="following" if ticket.stage is Stage.FOLLOWING else "running" if _is_running(ticket) else "waiting",
        received=request.received_at,
        instance_id=ticket.instance_id,
        node=ticket.node if ticket.instance_id is not None else "",
        attempts=ticket.attempts,
        ttft_ms=(first_token_at - ticket.arrived_at) * 1e3 if first_token_at is not None else None,
        output_tokens=max(stats.usage.completion_tokens, request.resume_state.tokens),
    )


def _is_running(ticket: Ticket) -> bool:
    return ticket.stage is Stage.SENT and ticket.is_admitted
