"""`/admin/v1/models/NAME/pull`: bring a model's weights to a node, without starting an instance."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from services.gateway.http.endpoints.admin import ask_scheduler
from services.gateway.http.errors import json_response
from services.gateway.http.parsing.body import read_body
from services.gateway.http.parsing.query import read_integer
from services.gateway.http.parsing.validation import validate_body
from services.gateway.http.scopes import ScopedRoute
from services.gateway.loop import Gateway
from shared.contracts.admin import ModelPulled, PullModel, PullOptions
from shared.errors import DeadlineExceeded, ReplyLost, ShuttingDown, Unavailable
from shared.tasks import end

_MAX_BODY = 64 * 1024
_LONGEST_S = 86_400
_DISCONNECTED = 499
"""Status of a response that no client receives, as in nginx."""


class ModelPulls:
    """Forwards pulls to the scheduler, however long they take.

    A download may take longer than one request in the mesh, and than the term of a scheduler: the
    gateway repeats the request, which joins the pull in progress.
    """

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    def routes(self) -> list[ScopedRoute]:
        return [ScopedRoute("/admin/v1/models/{name:path}/pull", self.pull, methods=["POST"], needs="admin")]

    async def pull(self, request: Request) -> Response:
        """Pull a model, and wait for the end, at most `?timeout=` seconds.

        The pull continues after a timeout, and after the client has disconnected. A gateway that
        shuts down does not wait: the client retries on another one.
        """
        timeout_s = read_integer(request, "timeout", _LONGEST_S, maximum=_LONGEST_S)
        body = await read_body(request.scope, request.receive, _MAX_BODY)
        options = validate_body(PullOptions, body or b"{}")
        name = request.path_params["name"]
        reply = asyncio.create_task(self._ask(PullModel(name=name, options=options)), name=f"pull {name}")
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

    async def _ask(self, message: PullModel) -> ModelPulled:
        """Return the reply, repeating a request that ended before its pull."""
        while True:
            try:
                return await ask_scheduler(self._gateway, message, ModelPulled)
            except (DeadlineExceeded, ReplyLost):
                continue
            except Unavailable as e:
                if e.retry_after_ms is None:  # else the scheduler that has answered leads no more
                    raise
                await asyncio.sleep(e.retry_after_ms / 1e3)


async def _wait_for_disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
