"""Limits and conditions of failover."""

from __future__ import annotations

import math

from services.gateway.domain.route_table import Route
from services.gateway.domain.ticket import Ticket
from shared.contracts.node import InstanceState, InstanceStatus
from shared.errors import EngineKilled

MAX_ATTEMPTS = 12
MAX_ENGINE_DEATHS = 2
MAX_SHARED_ENGINE_DEATHS = 4
MAX_MESSAGE_LOSSES = 3
MAX_LOSSES_BEFORE_ADMISSION = 32
MAX_LOSSES = 64
GONE_GRACE_S = 0.3
"""Messages of an instance that is reported failed or stopped may still arrive for this long."""
ABSENT_GRACE_S = 3.0
"""An instance that its node does not report may be silent for this long.

A nodeagent that has just restarted adopts its engines first.
"""
STALL_S = 30.0
"""A request may be silent for this long while its node is silent: engines outlive nodeagents."""
IDLE_GRACE_S = 10.0
"""A request counts as lost after its instance has reported itself idle for this long."""
PROBE_AFTER_S = 10.0
"""Silence of a request after which its instance is probed.

An instance that serves other requests is never reported idle.
"""
PROBE_SOON_S = 1.0
"""The same after a reconnection to NATS, which may have lost messages, and after a probe that found
no engine: engines reconnect too.
"""


def is_instance_gone(
    ticket: Ticket, route: Route | None, now: float, *, is_node_known: bool, connected_since: float = -math.inf
) -> bool:
    """True if no further message of the request's instance is to be expected.

    Args:
        connected_since: Time since which the gateway's own connection works. Earlier silence proves
            nothing.
    """
    silence_s = now - max(ticket.last_activity_at, connected_since)
    if route is None:
        return silence_s >= (ABSENT_GRACE_S if is_node_known else STALL_S)
    if route.status.state in (InstanceState.FAILED, InstanceState.STOPPED):
        return silence_s >= GONE_GRACE_S
    return route.idle_since is not None and min(silence_s, now - route.idle_since) >= IDLE_GRACE_S


def has_crashed(status: InstanceStatus) -> bool:
    """True if the engine died by itself.

    A killed engine is no evidence against its requests.
    """
    was_killed = status.error is not None and status.error.code == EngineKilled.code
    return status.state is InstanceState.FAILED and not was_killed


def is_missing(ticket: Ticket, now: float) -> bool:
    """True if the instance reported the request missing, and is silent since."""
    reported_at = ticket.reported_missing_at
    return reported_at > ticket.last_activity_at and now - reported_at >= GONE_GRACE_S


def needs_probe(ticket: Ticket, now: float) -> bool:
    """True if the request has been silent for too long since its last message or probe."""
    since = max(ticket.last_activity_at, ticket.probed_at)
    if ticket.disturbed_at > since and now - ticket.disturbed_at >= PROBE_SOON_S:
        return True
    return now - since >= PROBE_AFTER_S


def count_loss(ticket: Ticket, *, is_reported: bool, has_died: bool) -> None:
    """Count one more loss of the request's instance.

    Args:
        is_reported: A host reported the loss; it had passed the request to its engine.
        has_died: The engine died, rather than only its messages being lost.
    """
    ticket.losses += 1
    if not (ticket.is_admitted or is_reported):
        ticket.losses_before_admission += 1
    elif has_died:
        ticket.engine_deaths += 1
    else:
        ticket.message_losses += 1


def is_poison(ticket: Ticket, *, is_shared: bool) -> bool:
    """True if the request is assumed to kill its engines.

    Args:
        is_shared: The last engine that died served other requests as well.
    """
    return ticket.engine_deaths >= (MAX_SHARED_ENGINE_DEATHS if is_shared else MAX_ENGINE_DEATHS)


def is_suspect(ticket: Ticket) -> bool:
    """True if the request is one of several of which one may kill engines."""
    return ticket.engine_deaths >= MAX_ENGINE_DEATHS


def may_retry(ticket: Ticket) -> bool:
    """True if another instance may be tried."""
    return (
        ticket.message_losses <= MAX_MESSAGE_LOSSES
        and ticket.losses_before_admission <= MAX_LOSSES_BEFORE_ADMISSION
        and ticket.losses <= MAX_LOSSES
    )
