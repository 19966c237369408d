"""The port through which the dispatcher acts on the outside."""

from __future__ import annotations

from typing import Protocol

from services.gateway.domain.route_table import Route
from services.gateway.domain.ticket import Ticket
from shared.contracts.demand import Demand
from shared.errors import ThawError


class Effects(Protocol):
    """Side effects of the dispatcher's decisions."""

    def send(self, ticket: Ticket, route: Route) -> None:
        """Send the request to the instance of `route`, which the ticket names."""

    def cancel(self, ticket: Ticket) -> None:
        """Have the instance stop working on the request."""

    def fail(self, ticket: Ticket, error: ThawError) -> None:
        """Answer the client with an error."""

    def publish_demand(self, demand: Demand) -> None:
        """Report to the scheduler how many requests wait for a model."""

    def probe(self, ticket: Ticket) -> None:
        """Ask the instance whether it has the request; if not, call `on_missing`."""

    def on_requeued(self, ticket: Ticket) -> None:
        """Note that the request lost its instance and waits for another one."""
