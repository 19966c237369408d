"""What the dispatcher has done by others."""

from __future__ import annotations

from typing import Protocol

from services.gateway.domain.ticket import Ticket
from shared.contracts.demand import Demand
from shared.errors import ThawError


class Effects(Protocol):
    """The one way out of the dispatcher."""

    def send(self, ticket: Ticket) -> None:
        """Give the request to the instance it names."""

    def cancel(self, ticket: Ticket) -> None:
        """Tell the instance to stop working on the request."""

    def fail(self, ticket: Ticket, error: ThawError) -> None:
        """Answer the client with an error."""

    def demand(self, demand: Demand) -> None:
        """Tell the scheduler what waits."""

    def inquire(self, ticket: Ticket) -> None:
        """Ask the instance whether it has the request still; if not, `on_missing` is to be called."""

    def requeued(self, ticket: Ticket) -> None:
        """The request, which an instance had, waits for another one."""
