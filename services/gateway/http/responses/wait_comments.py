"""What a client is told while it waits."""

from __future__ import annotations

import time

from services.gateway.domain.dispatcher import Dispatcher
from services.gateway.domain.ticket import Stage
from services.gateway.requests.active_request import Exchange


def progress_of(exchange: Exchange, dispatcher: Dispatcher) -> str:
    """One line: which phase of its model's start the request waits for, how far it is, and how long it is thought to take."""
    model, now = exchange.ticket.model, time.monotonic()
    if exchange.ticket.stage is Stage.FOLLOWING:
        return "waiting for the first request with this Idempotency-Key"
    if exchange.ticket.stage is Stage.SENT:
        return f"waiting for {model}, phase=prefill"
    queue = dispatcher.queue(model)
    start = dispatcher.routes.starting(model)
    phase = (start.phase.value if start.phase else start.state.value) if start is not None else "queue"
    parts = [f"waking {model}", f"phase={phase}"]
    if start is not None and start.progress:
        parts.append(f"progress={start.progress:.0%}")
    eta = queue.eta_ms(now) if queue is not None else None
    parts.append(f"eta={eta / 1000:.1f}s" if eta is not None else "eta=unknown")
    if queue is not None:
        parts.append(f"waiting={len(queue.waiting)}")
        if queue.noted is not None and queue.noted.reason:
            parts.append(queue.noted.reason)
    return ", ".join(parts)
