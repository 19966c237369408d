"""Routes that declare which scope of an API key they need.

The request boundary authenticates the caller (`scope["thaw.caller"]`); the route compares scopes. A
router of such routes refuses others, so that no new route is open to a read-only key by mistake.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from starlette.routing import BaseRoute, Route
from starlette.types import Receive, Scope, Send

from services.gateway.domain.caller import Caller
from shared.contracts.keys import Scope as KeyScope

CALLER = "thaw.caller"
IS_OF_BATCH = "thaw.is_of_batch"
"""True for a batch's requests, which the gateway itself repeats if they are rejected."""


def caller_of(scope: Scope) -> Caller:
    """Return the authenticated caller of a request."""
    caller: Caller = scope[CALLER]
    return caller


class ScopedRoute(Route):
    """A route that needs a scope: `read-only` for views, `admin` for changes."""

    def __init__(self, path: str, endpoint: Callable[..., Any], *, methods: list[str], needs: KeyScope) -> None:
        super().__init__(path, endpoint, methods=methods)
        self.needs = needs

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve the request. Raises `PermissionDenied` if the caller's scope does not suffice."""
        caller_of(scope).require(self.needs)
        await super().handle(scope, receive, send)


def check_scoped(routes: Iterable[BaseRoute], prefix: str) -> None:
    """Raise `TypeError` if a route below `prefix` declares no scope."""
    for route in routes:
        if isinstance(route, Route) and route.path.startswith(prefix) and not isinstance(route, ScopedRoute):
            raise TypeError(f"{route.path} declares no scope")
