"""The admin API: each route one request to the scheduler, its typed reply as JSON; and the traces."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterable
from typing import Any

from nats.errors import Error as NatsError
from nats.js.errors import NotFoundError
from pydantic import TypeAdapter
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from services.gateway.http.errors import json_response
from services.gateway.http.parsing.body import read_body
from services.gateway.http.parsing.request_parser import validated
from services.gateway.loop import Gateway
from shared.contracts import subjects
from shared.contracts.admin import (
    AddModels,
    ChangeNode,
    ClusterView,
    ExplainPlan,
    Migrate,
    MigrationsViewed,
    ModelAsleep,
    ModelAwake,
    ModelsAdded,
    PlanExplained,
    RemoveModel,
    SleepModel,
    ViewCluster,
    ViewMigrations,
    WakeModel,
)
from shared.contracts.base import Done, Message
from shared.contracts.base import Request as MeshRequest
from shared.contracts.keys import ApiKey, KeyList, NewKey
from shared.contracts.models import ModelSpec, code_fields
from shared.contracts.traces import RequestTrace, TracePage
from shared.errors import InvalidRequest, NotFound, PermissionDenied, ShuttingDown, Unavailable, Unreachable

_ACTION: TypeAdapter[ChangeNode] = TypeAdapter(ChangeNode)
_MAX_BODY = 4 * 1024 * 1024
_MAX_KEY_BODY = 64 * 1024
_MOST_TRACES = 1000
"""In one page."""


class Admin:
    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    def routes(self) -> list[Route]:
        at = "/admin/v1"
        return [
            Route(f"{at}/cluster", self.cluster, methods=["GET"]),
            Route(f"{at}/models", self.add_models, methods=["POST"]),
            Route(f"{at}/models/{{name:path}}/wake", self.wake, methods=["POST"]),
            Route(f"{at}/models/{{name:path}}/sleep", self.sleep, methods=["POST"]),
            Route(f"{at}/models/{{name:path}}", self.remove_model, methods=["DELETE"]),
            Route(f"{at}/keys", self.keys, methods=["GET"]),
            Route(f"{at}/keys", self.add_key, methods=["POST"]),
            Route(f"{at}/keys/{{name}}", self.revoke_key, methods=["DELETE"]),
            Route(f"{at}/explain", self.explain, methods=["GET"]),
            Route(f"{at}/explain", self.what_if, methods=["POST"]),
            Route(f"{at}/nodes/{{node}}/cordon", self.cordon, methods=["POST"]),
            Route(f"{at}/nodes/{{node}}/uncordon", self.uncordon, methods=["POST"]),
            Route(f"{at}/nodes/{{node}}/drain", self.drain, methods=["POST"]),
            Route(f"{at}/migrations", self.migrate, methods=["POST"]),
            Route(f"{at}/migrations", self.migrations, methods=["GET"]),
            Route(f"{at}/migrations/{{migration_id}}", self.migrations, methods=["GET"]),
            Route(f"{at}/traces", self.traces, methods=["GET"]),
            Route(f"{at}/traces/last", self.last_trace, methods=["GET"]),
            Route(f"{at}/traces/loads/{{plan_id}}", self.load_trace, methods=["GET"]),
            Route(f"{at}/traces/{{request_id}}", self.request_trace, methods=["GET"]),
        ]

    async def _ask(self, message: MeshRequest, reply: type[Message]) -> Response:
        try:
            answer = await self._gateway.mesh.request(subjects.ADMIN, message, reply)
        except Unreachable as e:
            raise Unreachable(
                "No scheduler leads: it is stopped, starting, or PostgreSQL refuses it. The scheduler's log (`thaw logs scheduler`) says which"
            ) from e
        return json_response(answer.model_dump(mode="json"))

    async def cluster(self, request: Request) -> Response:
        return await self._ask(ViewCluster(), ClusterView)

    async def add_models(self, request: Request) -> Response:
        limit = min(_MAX_BODY, self._gateway.mesh.max_body)
        asked = validated(AddModels, await read_body(request.scope, request.receive, limit))
        if not self._gateway.keys.guards_admin:
            _refuse_commands(asked.specs)
        return await self._ask(AddModels(specs=asked.specs, prune=asked.prune, reread=asked.reread), ModelsAdded)

    async def remove_model(self, request: Request) -> Response:
        """`?adapters=true`: and its adapters."""
        name, too = request.path_params["name"], request.query_params.get("adapters") == "true"
        return await self._ask(RemoveModel(name=name, with_adapters=too), Done)

    async def wake(self, request: Request) -> Response:
        """It may wait for minutes; a gateway that ends does not: another one answers a retry."""
        message = WakeModel(deadline_ms=_deadline(request, WakeModel), name=request.path_params["name"])
        asking = asyncio.ensure_future(self._ask(message, ModelAwake))
        closing = asyncio.ensure_future(self._gateway.closes.wait())
        waits: set[asyncio.Future[Any]] = {asking, closing}
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            if not asking.done():
                raise ShuttingDown
            return asking.result()
        finally:
            asking.cancel()
            closing.cancel()

    async def sleep(self, request: Request) -> Response:
        return await self._ask(
            SleepModel(deadline_ms=_deadline(request, SleepModel), name=request.path_params["name"]), ModelAsleep
        )

    async def keys(self, request: Request) -> Response:
        keys = self._gateway.keys
        found = KeyList(keys=tuple(keys.store.all()), configured=len(keys.configured), required=keys.required)
        return json_response(found.model_dump(mode="json"))

    async def add_key(self, request: Request) -> Response:
        asked = validated(NewKey, await read_body(request.scope, request.receive, _MAX_KEY_BODY))
        if asked.scope == "admin" and not self._gateway.keys.guards_admin:
            raise PermissionDenied(
                "An admin API without a key makes no admin keys. Start the gateway with THAW_ADMIN_KEY, and bring that key.",
                param="scope",
            )
        key = ApiKey(name=asked.name, scope=asked.scope, created=int(time.time()))
        await self._gateway.keys.store.add(asked.sha256, key)
        return json_response(key.model_dump(mode="json"))

    async def revoke_key(self, request: Request) -> Response:
        return json_response((await self._gateway.keys.store.revoke(request.path_params["name"])).model_dump(mode="json"))

    async def explain(self, request: Request) -> Response:
        """`?model=NAME`, `?plan=ID`, `?request=ID`, or `?about=` any of them."""
        given = {name: request.query_params.get(name) or None for name in ("model", "plan", "request", "about")}
        if not any(given.values()):
            raise InvalidRequest("explain needs a model, a plan or a request: ?model=NAME, ?plan=ID or ?request=ID", param="model")
        asked = ExplainPlan(
            model=given["model"],
            plan_id=given["plan"],
            request_id=given["request"],
            about=given["about"],
        )
        return await self._ask(asked, PlanExplained)

    async def what_if(self, request: Request) -> Response:
        """The same with a body, which may assume another cluster."""
        asked = validated(ExplainPlan, await read_body(request.scope, request.receive, _MAX_KEY_BODY))
        return await self._ask(asked.model_copy(update={"deadline_ms": ExplainPlan.usual_ms()}), PlanExplained)

    async def migrate(self, request: Request) -> Response:
        """Answers when it is over; with `wait` false once it is ordered."""
        asked = validated(Migrate, await read_body(request.scope, request.receive, _MAX_KEY_BODY))
        return await self._ask(asked.model_copy(update={"deadline_ms": _deadline(request, Migrate)}), MigrationsViewed)

    async def migrations(self, request: Request) -> Response:
        """`?limit=`: so many at most, the latest first."""
        limit = request.query_params.get("limit", "50")
        if not limit.isdigit() or not 0 < int(limit) <= 1000:
            raise InvalidRequest("limit must be a number from 1 to 1000", param="limit")
        view = ViewMigrations(migration_id=request.path_params.get("migration_id"), limit=int(limit))
        return await self._ask(view, MigrationsViewed)

    async def cordon(self, request: Request) -> Response:
        return await self._change_node(request, "cordon")

    async def uncordon(self, request: Request) -> Response:
        return await self._change_node(request, "uncordon")

    async def drain(self, request: Request) -> Response:
        return await self._change_node(request, "drain")

    async def _change_node(self, request: Request, action: str) -> Response:
        fields = {"node": request.path_params["node"], "action": action}
        return await self._ask(_ACTION.validate_python(fields), Done)

    async def request_trace(self, request: Request) -> Response:
        request_id = request.path_params["request_id"]
        return await self._trace(subjects.request_trace(request_id), f"There is no trace of request {request_id}")

    async def load_trace(self, request: Request) -> Response:
        plan_id = request.path_params["plan_id"]
        return await self._trace(subjects.load_trace(plan_id), f"There is no trace of plan {plan_id}")

    async def last_trace(self, request: Request) -> Response:
        return await self._trace(f"{subjects.PREFIX}.traces.request.*", "No request has been traced yet")

    async def traces(self, request: Request) -> Response:
        """`?from=SEQUENCE&limit=N`: a page of what is kept, the oldest first."""
        begin, limit = _whole(request, "from", 1, most=2**62), _whole(request, "limit", 200, most=_MOST_TRACES)
        js = self._gateway.mesh.nc.jetstream(timeout=5)
        found: list[RequestTrace] = []
        every = f"{subjects.PREFIX}.traces.request.*"
        try:
            while len(found) < limit:
                message = await js.get_msg(subjects.TRACE_STREAM, seq=begin, subject=every, next=True)
                found.append(RequestTrace.model_validate_json(message.data or b"null"))
                begin = (message.seq or begin) + 1
        except NotFoundError:
            return json_response(TracePage(traces=tuple(found)).model_dump(mode="json"))
        except (NatsError, TimeoutError) as e:
            raise Unavailable(f"the traces cannot be read now: {type(e).__name__}", should_retry=True) from e
        return json_response(TracePage(traces=tuple(found), next=begin).model_dump(mode="json"))

    async def _trace(self, subject: str, absent: str) -> Response:
        js = self._gateway.mesh.nc.jetstream(timeout=5)
        try:
            found = await js.get_last_msg(subjects.TRACE_STREAM, subject)
        except NotFoundError as e:
            raise NotFound(absent) from e
        except (NatsError, TimeoutError) as e:
            raise Unavailable(f"the traces cannot be read now: {type(e).__name__}", should_retry=True) from e
        return json_response(json.loads(found.data or b"null"))


def _refuse_commands(specs: Iterable[ModelSpec]) -> None:
    """What a node is to run is the operator's to say: an admin API that is open to whoever reaches its port takes no commands, and no code
    that comes with a model. Options of other engines can name code as well (vLLM's plug-ins and middleware)."""
    for spec in specs:
        if named := code_fields(spec):
            raise PermissionDenied(
                f"{spec.name}: an admin API without a key takes no {' and no '.join(named)}. Start the gateway with THAW_ADMIN_KEY.",
                param=named[0],
            )


def _whole(request: Request, name: str, default: int, most: int) -> int:
    given = request.query_params.get(name, str(default))
    if not given.isdecimal() or not 1 <= int(given) <= most:
        raise InvalidRequest(f"{name}={given!r} is not a whole number from 1 to {most}", param=name)
    return int(given)


def _deadline(request: Request, kind: type[MeshRequest]) -> int:
    """`?timeout=SECONDS`, or the message's own deadline, in milliseconds."""
    given = request.query_params.get("timeout")
    if given is None:
        return kind.usual_ms()
    try:
        seconds = float(given)
    except ValueError as e:
        raise InvalidRequest(f"timeout={given!r} is not a number of seconds", param="timeout") from e
    if not 0 < seconds <= 86_400:
        raise InvalidRequest("timeout must be between 0 and 86400 seconds", param="timeout")
    return max(1, int(seconds * 1e3))
