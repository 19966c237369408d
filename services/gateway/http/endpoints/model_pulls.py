"""`/admin/v1/models/NAME/pull`: bring a model's weights to a node, or cancel that.

No instance is started.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from services.gateway.domain.pull_paths import removes_model
from services.gateway.http.endpoints.admin import actor_of, ask_scheduler, remove_model
from services.gateway.http.errors import json_response
from services.gateway.http.parsing.body import read_body
from services.gateway.http.parsing.query import read_integer
from services.gateway.http.parsing.validation import validate_body
from services.gateway.http.scopes import ScopedRoute
from services.gateway.loop import Gateway
from shared.contracts.admin import CancelPulls, ModelPulled, PullModel, PullOptions, PullsCancelled
from shared.errors import DeadlineExceeded, InvalidRequest, ModelNotFound, ReplyLost, ShuttingDown, Unavailable
from shared.tasks import end

log = logging.getLogger(__name__)
_MAX_BODY = 64 * 1024
_LONGEST_S = 86_400
_DISCONNECTED = 499
"""Status of a response that no client receives, as in nginx."""
_TIERS = ("ssd", "dram")


class ModelPulls:
    """Forwards pulls to the scheduler, however long they take."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    def routes(self) -> list[ScopedRoute]:
        path = "/admin/v1/models/{name:path}/pull"
        return [
            ScopedRoute(path, self.pull, methods=["POST"], needs="admin"),
            ScopedRoute(path, self.delete, methods=["DELETE"], needs="admin"),
        ]

    async def pull(self, request: Request) -> Response:
        """Pull a model, and wait for the end, at most `?timeout=` seconds.

        The pull continues after a timeout, and after the client has disconnected. A gateway that
        shuts down does not wait: the client retries on another one.
        """
        timeout_s = read_integer(request, "timeout", _LONGEST_S, maximum=_LONGEST_S)
        body = await read_body(request.scope, request.receive, _MAX_BODY)
        options = validate_body(PullOptions, body or b"{}")
        name = request.path_params["name"]
        reply = asyncio.create_task(ask_pull(self._gateway, name, options), name=f"pull {name}")
        closing = asyncio.create_task(self._gateway.closing.wait(), name="closing")
        leaving = asyncio.create_task(_wait_for_disconnect(request), name="client")
        waits: tuple[asyncio.Task[Any], ...] = (reply, closing, leaving)
        try:
            await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if reply.done():
                return json_response(reply.result().model_dump(mode="json"))
            if closing.done():
                raise ShuttingDown
            if leaving.done():
                return Response(status_code=_DISCONNECTED)
            raise DeadlineExceeded(f"{name} is still being pulled after {timeout_s} s, and the pull continues. Repeat the request")
        finally:
            await end(*waits)

    async def delete(self, request: Request) -> Response:
        """Cancel the pulls of a model, or remove the model that is called `NAME/pull`."""
        name = request.path_params["name"]
        if removes_model(request.scope.get("raw_path", b""), name, self._is_registered):
            return await remove_model(self._gateway, request, f"{name}/pull")
        return await self._cancel(request, name)

    def _is_registered(self, name: str) -> bool:
        try:
            self._gateway.catalog.find_model(name)
        except ModelNotFound:
            return False
        return True

    async def _cancel(self, request: Request, name: str) -> Response:
        """Cancel the pulls of a model, of `?node=` and `?tier=` only if they are given.

        The answer lists those that were in progress; none is not an error.
        """
        node, tier = (request.query_params.get(name) for name in ("node", "tier"))
        if node == "":
            raise InvalidRequest("'node' is empty. Name a node, or leave it out", param="node")
        if tier not in (None, *_TIERS):
            raise InvalidRequest(f"tier={tier!r} is neither ssd nor dram", param="tier")
        message = CancelPulls.model_validate({"name": name, "node": node, "tier": tier})
        cancelled = await ask_scheduler(self._gateway, message, PullsCancelled)
        actor, targets = actor_of(request), [f"{p.tier} of {p.node}" for p in cancelled.cancelled]
        log.info(
            "pulls cancelled", extra={"model": cancelled.name, "targets": targets, "actor": actor.name, "client": actor.address}
        )
        return json_response(cancelled.model_dump(mode="json"))


async def ask_pull(gateway: Gateway, name: str, options: PullOptions) -> ModelPulled:
    """Return the reply to a pull.

    A download may take longer than one request in the mesh, and than the term of a scheduler: the
    request is repeated. It has an id, and joins the pull in progress or gets its answer.
    """
    message = PullModel(name=name, options=options, request_id=uuid.uuid4().hex)
    while True:
        try:
            return await ask_scheduler(gateway, message, ModelPulled)
        except (DeadlineExceeded, ReplyLost):
            continue
        except Unavailable as e:
            if e.retry_after_ms is None:  # else the scheduler that has answered leads no more
                raise
            await asyncio.sleep(e.retry_after_ms / 1e3)


async def _wait_for_disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
