"""When an instance is given up for a request, and when the request is."""

from __future__ import annotations

from services.gateway.domain.route_table import Route
from services.gateway.domain.ticket import Ticket
from shared.contracts.node import InstanceState, InstanceStatus
from shared.errors import EngineKilled

MAX_ATTEMPTS = 12
MAX_DEATHS = 2
MAX_SHARED_DEATHS = 4
MAX_LOST = 3
MAX_UNHEARD = 32
MAX_LOSSES = 64
GONE_GRACE_S = 0.3
"""How long an instance reported failed or stopped may still have messages under way."""
ABSENT_GRACE_S = 3.0
"""How long an instance that no status mentions may be silent: a nodeagent that has just come back adopts its engines first."""
STALL_S = 30.0
"""How long a request may be silent while its whole node is: an engine whose nodeagent is gone goes on serving."""
IDLE_GRACE_S = 10.0
"""How long an instance may say that it has nothing to do before a request it was given is taken for lost (NATS restarted meanwhile)."""
ASK_AFTER_S = 10.0
"""How long an instance may say nothing of a request before it is asked whether it has it: while it serves others it is never idle."""


def gone(ticket: Ticket, route: Route | None, now: float, *, node_known: bool) -> bool:
    """Whether nothing more is to be expected of the instance that has the request."""
    silent = now - max(ticket.heard_at, ticket.sent_at)
    if route is None:
        return silent >= (ABSENT_GRACE_S if node_known else STALL_S)
    if route.status.state in (InstanceState.FAILED, InstanceState.STOPPED):
        return silent >= GONE_GRACE_S
    return route.idle_since is not None and min(silent, now - route.idle_since) >= IDLE_GRACE_S


def died_by_itself(status: InstanceStatus) -> bool:
    """Whether an instance's engine has died, and not been killed from outside, which says nothing of what it was doing."""
    return status.state is InstanceState.FAILED and not (status.error is not None and status.error.code == EngineKilled.code)


def missing(ticket: Ticket, now: float) -> bool:
    """Whether the instance has said that it has no such request, and nothing has come since."""
    return ticket.missing_at > max(ticket.heard_at, ticket.sent_at) and now - ticket.missing_at >= GONE_GRACE_S


def doubtful(ticket: Ticket, now: float) -> bool:
    """Whether it is time to ask the instance whether it has the request."""
    return now - max(ticket.heard_at, ticket.sent_at, ticket.asked_at) >= ASK_AFTER_S


def count(ticket: Ticket, *, told: bool, died: bool) -> None:
    """One more loss of its instance. `told`: a host said so, which had given the request to its engine. `died`: not only its words are lost."""
    ticket.losses += 1
    if not (ticket.admitted or told):
        ticket.unheard += 1
    elif died:
        ticket.deaths += 1
    else:
        ticket.lost += 1


def deadly(ticket: Ticket, *, shared: bool) -> bool:
    """Whether the request is taken for what its engines die of. `shared`: the last of them served others as well."""
    return ticket.deaths >= (MAX_SHARED_DEATHS if shared else MAX_DEATHS)


def suspected(ticket: Ticket) -> bool:
    """Whether it is one of several of which one may be that."""
    return ticket.deaths >= MAX_DEATHS


def bearable(ticket: Ticket) -> bool:
    """Whether another instance may be tried."""
    return ticket.lost <= MAX_LOST and ticket.unheard <= MAX_UNHEARD and ticket.losses <= MAX_LOSSES
