"""Comments about what a request waits for."""

from __future__ import annotations

import time

from services.gateway.domain.dispatcher import Dispatcher
from services.gateway.domain.ticket import Stage
from services.gateway.requests.active_request import ActiveRequest


def describe_wait(request: ActiveRequest, dispatcher: Dispatcher) -> str:
    """Describe in one line what a request waits for, with progress and estimate."""
    model, now = request.ticket.model, time.monotonic()
    if request.ticket.stage is Stage.FOLLOWING:
        return "waiting for the first request with this Idempotency-Key"
    if request.ticket.stage is Stage.QUEUED and not dispatcher.routes.is_connected:
        return "waiting for the gateway's connection to NATS"
    if request.ticket.stage is Stage.SENT:
        return f"waiting for {model}, phase=prefill"
    queue = dispatcher.queue(model)
    start = dispatcher.routes.most_advanced_start(model)
    phase = (start.phase.value if start.phase else start.state.value) if start is not None else "queue"
    parts = [f"waking {model}", f"phase={phase}"]
    if start is not None and start.progress:
        parts.append(f"progress={start.progress:.0%}")
    eta_ms = queue.eta_ms(now) if queue is not None else None
    parts.append(f"eta={eta_ms / 1000:.1f}s" if eta_ms is not None else "eta=unknown")
    if queue is not None:
        parts.append(f"waiting={len(queue.waiting)}")
        if queue.reply is not None and queue.reply.reason:
            parts.append(queue.reply.reason)
    return ", ".join(parts)
