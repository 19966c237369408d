"""The admin API: requests to the scheduler, API keys, and traces."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, TypeVar

from nats.errors import Error as NatsError
from nats.js.errors import NotFoundError
from pydantic import TypeAdapter
from starlette.requests import Request
from starlette.responses import Response

from services.gateway.adapters.gateway_replies import collect_replies
from services.gateway.adapters.key_writer import MAX_LOG_ENTRIES, Actor
from services.gateway.domain.latency_log import summarize_history
from services.gateway.http.errors import json_response
from services.gateway.http.parsing.body import read_body
from services.gateway.http.parsing.query import read_integer
from services.gateway.http.parsing.validation import validate_body
from services.gateway.http.scopes import ScopedRoute, caller_of
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
from shared.contracts.keys import ApiKey, ChangeKey, KeyList, KeyLog, NewKey, RotateKey
from shared.contracts.latencies import HISTORY_MINUTES, ViewLatencies
from shared.contracts.models import ModelSpec, code_fields
from shared.contracts.traces import RequestTrace, TracePage, parse_trace
from shared.contracts.usage import UsageViewed, ViewUsage
from shared.errors import InvalidRequest, NotFound, PermissionDenied, ShuttingDown, Unavailable, Unreachable

M = TypeVar("M", bound=Message)
_ACTION: TypeAdapter[ChangeNode] = TypeAdapter(ChangeNode)
_MAX_BODY = 4 * 1024 * 1024
_MAX_KEY_BODY = 64 * 1024
_MAX_PAGE_TRACES = 1000


class Admin:
    """Handlers of `/admin/v1`."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    def routes(self) -> list[ScopedRoute]:
        at = "/admin/v1"
        views: dict[str, Callable[[Request], Awaitable[Response]]] = {
            "cluster": self.cluster,
            "keys": self.keys,
            "explain": self.explain,
            "migrations": self.migrations,
            "migrations/{migration_id}": self.migrations,
            "models/{name:path}/latencies": self.latencies,
            "usage": self.usage,
            "traces": self.traces,
            "traces/last": self.last_trace,
            "traces/loads/{plan_id}": self.load_trace,
            "traces/{request_id}": self.request_trace,
        }
        changes: list[tuple[str, str, Callable[[Request], Awaitable[Response]]]] = [
            ("POST", "models", self.add_models),
            ("POST", "models/{name:path}/wake", self.wake),
            ("POST", "models/{name:path}/sleep", self.sleep),
            ("DELETE", "models/{name:path}", self.remove_model),
            ("POST", "keys", self.add_key),
            ("PUT", "keys/{name}", self.put_key),
            ("PATCH", "keys/{name}", self.change_key),
            ("POST", "keys/{name}/rotate", self.rotate_key),
            ("DELETE", "keys/{name}", self.revoke_key),
            ("POST", "nodes/{node}/cordon", self.cordon),
            ("POST", "nodes/{node}/uncordon", self.uncordon),
            ("POST", "nodes/{node}/drain", self.drain),
            ("DELETE", "nodes/{node}", self.remove_node),
            ("POST", "migrations", self.migrate),
        ]
        return [
            *(ScopedRoute(f"{at}/{path}", view, methods=["GET"], needs="read-only") for path, view in views.items()),
            # It starts nothing: it answers what the scheduler would do.
            ScopedRoute(f"{at}/explain", self.what_if, methods=["POST"], needs="read-only"),
            ScopedRoute(f"{at}/key-log", self.key_log, methods=["GET"], needs="admin"),
            *(ScopedRoute(f"{at}/{path}", change, methods=[method], needs="admin") for method, path, change in changes),
        ]

    async def _request_scheduler(self, message: MeshRequest, reply: type[Message]) -> Response:
        return json_response((await self._ask_scheduler(message, reply)).model_dump(mode="json"))

    async def _ask_scheduler(self, message: MeshRequest, reply: type[M]) -> M:
        return await ask_scheduler(self._gateway, message, reply)

    async def cluster(self, request: Request) -> Response:
        """View the cluster; with `?brief=true` without candidates and measurements of plans.

        A read-only key sees no credentials of sources, and no values of `env`.
        """
        brief = request.query_params.get("brief") == "true"
        view = await self._ask_scheduler(ViewCluster(brief=brief), ClusterView)
        if not caller_of(request.scope).is_admin:
            view = view.without_secrets()
        return json_response(view.model_dump(mode="json"))

    async def add_models(self, request: Request) -> Response:
        limit = min(_MAX_BODY, self._gateway.mesh.max_body)
        body = validate_body(AddModels, await read_body(request.scope, request.receive, limit))
        if not self._gateway.authorizer.guards_admin:
            refuse_commands(body.specs)
        command = AddModels(specs=body.specs, prune=body.prune, reread=body.reread, replace=body.replace)
        reply = await self._request_scheduler(command, ModelsAdded)
        await self._gateway.readiness.catch_up_catalog()
        return reply

    async def latencies(self, request: Request) -> Response:
        """Return a model's latencies of the last hour, in intervals of `?step=` minutes."""
        step = read_integer(request, "step", 5, maximum=HISTORY_MINUTES)
        if HISTORY_MINUTES % step:
            raise InvalidRequest(f"step={step} does not divide an hour. Send a divisor of {HISTORY_MINUTES}", param="step")
        name = self._gateway.catalog.find_model(request.path_params["name"]).name
        own = self._gateway.view_latencies(name)
        views = await collect_replies(self._gateway.mesh, subjects.VIEW_LATENCIES, ViewLatencies(model=name), own)
        history = summarize_history(name, views, int(time.time() // 60), step)
        return json_response(history.model_dump(mode="json"))

    async def remove_model(self, request: Request) -> Response:
        return await remove_model(self._gateway, request, request.path_params["name"])

    async def wake(self, request: Request) -> Response:
        """Wake a model, which may take minutes.

        A gateway that shuts down does not wait: the client retries on another one.
        """
        message = WakeModel(deadline_ms=_deadline(request, WakeModel), name=request.path_params["name"])
        reply = asyncio.ensure_future(self._request_scheduler(message, ModelAwake))
        closing = asyncio.ensure_future(self._gateway.closing.wait())
        waits: set[asyncio.Future[Any]] = {reply, closing}
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            if not reply.done():
                raise ShuttingDown
            return reply.result()
        finally:
            reply.cancel()
            closing.cancel()

    async def sleep(self, request: Request) -> Response:
        return await self._request_scheduler(
            SleepModel(deadline_ms=_deadline(request, SleepModel), name=request.path_params["name"]), ModelAsleep
        )

    async def keys(self, request: Request) -> Response:
        authorizer = self._gateway.authorizer
        listed = KeyList(
            keys=tuple(authorizer.store.list_keys()),
            spending=self._gateway.budgets.list_spending(),
            configured=len(authorizer.configured),
            required=authorizer.required,
        )
        return json_response(listed.model_dump(mode="json"))

    async def add_key(self, request: Request) -> Response:
        body = await self._new_key(request)
        return _key_response(await self._gateway.key_writer.add(body, actor_of(request)))

    async def put_key(self, request: Request) -> Response:
        """Make a key exist as described, whether or not it does."""
        body = await self._new_key(request)
        if body.name != request.path_params["name"]:
            raise InvalidRequest("The name in the body differs from the name in the path", param="name")
        return _key_response(await self._gateway.key_writer.put(body, actor_of(request)))

    async def _new_key(self, request: Request) -> NewKey:
        body = validate_body(NewKey, await read_body(request.scope, request.receive, _MAX_KEY_BODY))
        if body.scope == "admin" and not self._gateway.authorizer.guards_admin:
            raise PermissionDenied(
                "An admin API without a key cannot create admin keys. Start the gateway with THAW_ADMIN_KEY, and send that key",
                param="scope",
            )
        return body

    async def change_key(self, request: Request) -> Response:
        body = validate_body(ChangeKey, await read_body(request.scope, request.receive, _MAX_KEY_BODY))
        return _key_response(await self._gateway.key_writer.change(request.path_params["name"], body, actor_of(request)))

    async def rotate_key(self, request: Request) -> Response:
        body = validate_body(RotateKey, await read_body(request.scope, request.receive, _MAX_KEY_BODY))
        return _key_response(await self._gateway.key_writer.rotate(request.path_params["name"], body, actor_of(request)))

    async def revoke_key(self, request: Request) -> Response:
        return _key_response(await self._gateway.key_writer.revoke(request.path_params["name"], actor_of(request)))

    async def key_log(self, request: Request) -> Response:
        """Return the latest changes of keys; `?limit=` at most."""
        limit = read_integer(request, "limit", 100, maximum=MAX_LOG_ENTRIES)
        return json_response(KeyLog(entries=await self._gateway.key_writer.read_log(limit)).model_dump(mode="json"))

    async def explain(self, request: Request) -> Response:
        """Explain `?model=NAME`, `?plan=ID`, `?request=ID`, or `?about=` any of them."""
        subject = {name: request.query_params.get(name) or None for name in ("model", "plan", "request", "about")}
        if not any(subject.values()):
            raise InvalidRequest(
                "Explain needs a model, a plan or a request. Add ?model=NAME, ?plan=ID or ?request=ID", param="model"
            )
        query = ExplainPlan(
            model=subject["model"],
            plan_id=subject["plan"],
            request_id=subject["request"],
            about=subject["about"],
        )
        return await self._request_scheduler(query, PlanExplained)

    async def what_if(self, request: Request) -> Response:
        """Explain with a body, which may assume another cluster."""
        body = validate_body(ExplainPlan, await read_body(request.scope, request.receive, _MAX_KEY_BODY))
        return await self._request_scheduler(body.model_copy(update={"deadline_ms": ExplainPlan.usual_ms()}), PlanExplained)

    async def migrate(self, request: Request) -> Response:
        """Migrate a model, and wait for the end unless `wait` is false."""
        body = validate_body(Migrate, await read_body(request.scope, request.receive, _MAX_KEY_BODY))
        return await self._request_scheduler(body.model_copy(update={"deadline_ms": _deadline(request, Migrate)}), MigrationsViewed)

    async def migrations(self, request: Request) -> Response:
        """List migrations, the latest first; `?limit=` at most."""
        limit = read_integer(request, "limit", 50, maximum=1000)
        view = ViewMigrations(migration_id=request.path_params.get("migration_id"), limit=limit)
        return await self._request_scheduler(view, MigrationsViewed)

    async def usage(self, request: Request) -> Response:
        """Sum up usage of `?since=` to `?until=` (hours since 1970) by `?by=key,model,hour`.

        With `?model=NAME` only that of one model.
        """
        given = request.query_params
        fields = {name: given[name] for name in ("since", "until", "model") if name in given}
        by = tuple(part for part in given.get("by", "key,model").split(",") if part)
        body = json.dumps({"since": int(time.time() // 3600) - 7 * 24} | fields | {"by": by}).encode()
        return await self._request_scheduler(validate_body(ViewUsage, body), UsageViewed)

    async def cordon(self, request: Request) -> Response:
        return await self._change_node(request, "cordon")

    async def uncordon(self, request: Request) -> Response:
        return await self._change_node(request, "uncordon")

    async def drain(self, request: Request) -> Response:
        return await self._change_node(request, "drain")

    async def remove_node(self, request: Request) -> Response:
        return await self._change_node(request, "remove")

    async def _change_node(self, request: Request, action: str) -> Response:
        fields = {"node": request.path_params["node"], "action": action}
        return await self._request_scheduler(_ACTION.validate_python(fields), Done)

    async def request_trace(self, request: Request) -> Response:
        request_id = request.path_params["request_id"]
        return await self._trace(subjects.request_trace(request_id), f"There is no trace of request {request_id}")

    async def load_trace(self, request: Request) -> Response:
        plan_id = request.path_params["plan_id"]
        return await self._trace(subjects.load_trace(plan_id), f"There is no trace of plan {plan_id}")

    async def last_trace(self, request: Request) -> Response:
        return await self._trace(f"{subjects.PREFIX}.traces.request.*", "No request has been traced yet")

    async def traces(self, request: Request) -> Response:
        """List stored traces, the oldest first; `?from=SEQUENCE&limit=N` selects a page.

        Traces that a newer version wrote may be missing in a page.
        """
        begin = read_integer(request, "from", 1, maximum=2**62)
        limit = read_integer(request, "limit", 200, maximum=_MAX_PAGE_TRACES)
        js = self._gateway.mesh.nc.jetstream(timeout=5)
        found: list[RequestTrace] = []
        every = f"{subjects.PREFIX}.traces.request.*"
        try:
            for _ in range(limit):
                message = await js.get_msg(subjects.TRACE_STREAM, seq=begin, subject=every, next=True)
                if (trace := parse_trace(message.data)) is not None:
                    found.append(trace)
                begin = (message.seq or begin) + 1
        except NotFoundError:
            return json_response(TracePage(traces=tuple(found)).model_dump(mode="json"))
        except (NatsError, TimeoutError) as e:
            raise Unavailable(f"The traces cannot be read now ({type(e).__name__}). Repeat the request", should_retry=True) from e
        return json_response(TracePage(traces=tuple(found), next=begin).model_dump(mode="json"))

    async def _trace(self, subject: str, not_found: str) -> Response:
        js = self._gateway.mesh.nc.jetstream(timeout=5)
        try:
            found = await js.get_last_msg(subjects.TRACE_STREAM, subject)
        except NotFoundError as e:
            raise NotFound(not_found) from e
        except (NatsError, TimeoutError) as e:
            raise Unavailable(f"The traces cannot be read now ({type(e).__name__}). Repeat the request", should_retry=True) from e
        return json_response(json.loads(found.data or b"null"))


async def ask_scheduler(gateway: Gateway, message: MeshRequest, reply: type[M]) -> M:
    """Return the scheduler's reply. Raises `Unreachable`."""
    try:
        return await gateway.mesh.request(subjects.ADMIN, message, reply, with_reports=True)
    except Unreachable as e:
        raise Unreachable(
            "No scheduler is the leader: it is stopped, starting, or PostgreSQL refuses it. See `thaw logs scheduler`"
        ) from e


async def remove_model(gateway: Gateway, request: Request, name: str) -> Response:
    """Remove a model; with `?adapters=true` its LoRA adapters too."""
    with_adapters = request.query_params.get("adapters") == "true"
    done = await ask_scheduler(gateway, RemoveModel(name=name, with_adapters=with_adapters), Done)
    await gateway.readiness.catch_up_catalog()
    return json_response(done.model_dump(mode="json"))


def _key_response(key: ApiKey) -> Response:
    return json_response(key.model_dump(mode="json"))


def actor_of(request: Request) -> Actor:
    return Actor(caller_of(request.scope).name or "no key", request.client.host if request.client else "")


def refuse_commands(specs: Iterable[ModelSpec]) -> None:
    """Refuse specs that make a node run commands or code of the caller.

    An admin API without a key is open to everyone who reaches its port; only the operator decides
    what nodes run. Options of engines can name code as well (vLLM's plug-ins and middleware).
    """
    for spec in specs:
        if fields := code_fields(spec):
            raise PermissionDenied(
                f"{spec.name}: an admin API without a key accepts no {' and no '.join(fields)}. "
                "Start the gateway with THAW_ADMIN_KEY",
                param=fields[0],
            )


def _deadline(request: Request, kind: type[MeshRequest]) -> int:
    """Return `?timeout=SECONDS`, or the default of the message, in milliseconds."""
    value = request.query_params.get("timeout")
    if value is None:
        return kind.usual_ms()
    try:
        seconds = float(value)
    except ValueError as e:
        raise InvalidRequest(f"timeout={value!r} is not a number of seconds", param="timeout") from e
    if not 0 < seconds <= 86_400:
        raise InvalidRequest("'timeout' must be between 0 and 86400 seconds", param="timeout")
    return max(1, int(seconds * 1e3))
