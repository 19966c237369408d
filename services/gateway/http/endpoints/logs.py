"""`/admin/v1/nodes/NODE/logs`: the logs of engines and of a node's services, for admin keys."""

from __future__ import annotations

from typing import TypeVar

from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import Response

from services.gateway.http.errors import json_response
from services.gateway.http.parsing.query import read_integer
from services.gateway.http.scopes import ScopedRoute
from services.gateway.loop import Gateway
from shared.contracts import subjects
from shared.contracts.base import Message
from shared.contracts.base import Request as MeshRequest
from shared.contracts.logs import MAX_LINES, ListLogs, LogRead, LogsListed, ReadLog
from shared.errors import NotFound, PermissionDenied, Unreachable

M = TypeVar("M", bound=Message)
_MAX_POSITION = 2**62


class Logs:
    """Lists and reads logs by asking the nodeagent of the node."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    def routes(self) -> list[ScopedRoute]:
        at = "/admin/v1/nodes/{node}/logs"
        return [
            ScopedRoute(at, self.list_logs, methods=["GET"], needs="admin"),
            ScopedRoute(at + "/{name}", self.read_log, methods=["GET"], needs="admin"),
        ]

    async def list_logs(self, request: Request) -> Response:
        return await self._respond(request.path_params["node"], ListLogs(), LogsListed)

    async def read_log(self, request: Request) -> Response:
        """Return the last `?lines=` lines, or the last of those `?after=` a position."""
        lines = read_integer(request, "lines", 200, minimum=1, maximum=MAX_LINES)
        after = read_integer(request, "after", 0, minimum=0, maximum=_MAX_POSITION) if "after" in request.query_params else None
        try:
            asked = ReadLog(name=request.path_params["name"], lines=lines, after=after)
        except ValidationError as e:
            raise NotFound("No log has such a name") from e
        return await self._respond(request.path_params["node"], asked, LogRead)

    async def _respond(self, node: str, message: MeshRequest, reply: type[M]) -> Response:
        if not self._gateway.authorizer.guards_admin:
            raise PermissionDenied(
                "An admin API without a key serves no logs: they may contain prompts and secrets. Start the gateway with THAW_ADMIN_KEY"
            )
        try:
            found = await self._gateway.mesh.request(subjects.node_logs(node), message, reply)
        except Unreachable as e:
            raise Unreachable(
                f"No nodeagent of {node} answers: it is stopped, or older than this gateway. `thaw ps` lists the nodes"
            ) from e
        return json_response(found.model_dump(mode="json"), headers={"cache-control": "no-store"})
