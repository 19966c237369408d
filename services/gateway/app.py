"""Wiring of the gateway: mesh, loop, HTTP server, and the order of shutdown.

Shutdown: refuse new connections, report it on /ready, let active requests finish (bounded), fail
the rest, write the last traces, and leave the mesh.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import socket
import sys
from functools import partial
from pathlib import Path
from typing import cast

import uvicorn
from nats.errors import Error as NatsError
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from services.gateway.adapters.catalog_watcher import CatalogWatcher
from services.gateway.adapters.garbage_collector import collect_when_idle, start_collecting_rarely
from services.gateway.adapters.rate_limiter import LEASE_LIMITS
from services.gateway.authorization import is_exposed
from services.gateway.domain.client_address import trusted_peers
from services.gateway.domain.request_limits import RequestLimits
from services.gateway.handlers.find_request import subscribe_find_request
from services.gateway.handlers.move_request import MoveRequestHandler
from services.gateway.handlers.view_latencies import subscribe_view_latencies
from services.gateway.handlers.view_requests import subscribe_view_requests
from services.gateway.http.batches.runner import BatchRunner
from services.gateway.http.console.endpoints import ROOT as CONSOLE_ROOT
from services.gateway.http.console.endpoints import Console
from services.gateway.http.endpoints.admin import Admin
from services.gateway.http.endpoints.batches import Batches
from services.gateway.http.endpoints.count_tokens import ROUTE as COUNT_TOKENS
from services.gateway.http.endpoints.count_tokens import CountTokens
from services.gateway.http.endpoints.doctor import Doctor
from services.gateway.http.endpoints.files import Files
from services.gateway.http.endpoints.inference import Inference
from services.gateway.http.endpoints.info import Info
from services.gateway.http.endpoints.logs import Logs
from services.gateway.http.endpoints.messages import ROUTE as MESSAGES
from services.gateway.http.endpoints.messages import Messages
from services.gateway.http.endpoints.model_pulls import ModelPulls
from services.gateway.http.endpoints.model_settings import ModelSettings
from services.gateway.http.endpoints.ollama import Ollama
from services.gateway.http.endpoints.responses import ROUTE as RESPONSES
from services.gateway.http.endpoints.responses import Responses, StoredResponses
from services.gateway.http.endpoints.scoring import ScoringInference
from services.gateway.http.endpoints.simulations import SimulationRoutes
from services.gateway.http.middleware.connection_limits import BoundedProtocol, ConnectionLimits, Connections
from services.gateway.http.middleware.error_boundary import ErrorBoundary
from services.gateway.http.middleware.request_guard import RequestGuard
from services.gateway.http.middleware.request_id import RequestIds
from services.gateway.http.parsing.parser_process import ParserProcess
from services.gateway.http.parsing.request_parser import BodyLimits
from services.gateway.http.responses.usage_header import USAGE_HEADER
from services.gateway.http.scopes import check_scoped
from services.gateway.http.server import HttpServer
from services.gateway.http.translation.scoring import SCORING_ROUTES
from services.gateway.loop import Gateway
from services.gateway.settings import GatewaySettings
from services.gateway.telemetry.metrics import Metrics
from services.gateway.telemetry.request_log import RequestLog
from shared.contracts import subjects
from shared.contracts.demand import LoadFailed
from shared.contracts.limits import GatewayPresent
from shared.contracts.migration import GATEWAY_CONTROL
from shared.contracts.node import NodeChanges, NodeStatus, StatusWanted
from shared.health import report_health
from shared.messaging import Mesh
from shared.messaging.buckets import BucketWatcher
from shared.messaging.streams import batches_bucket, catalog_bucket, keys_bucket
from shared.runtime import report_ready
from shared.tasks import end, wait_for_first

log = logging.getLogger(__name__)
_OTHER_OPEN_FILES = 256
"""Open files of a gateway other than client connections."""
_FLUSH_TIMEOUT_S = 2.0


def http_app(gateway: Gateway, parsers: ParserProcess, *, is_loopback: bool) -> ASGIApp:
    """Build the ASGI application: routes inside their middleware."""
    info = Info(gateway)
    routes = [
        Route("/v1/chat/completions", Inference(gateway, "chat", parsers), methods=["POST"]),
        Route("/v1/completions", Inference(gateway, "completion", parsers), methods=["POST"]),
        Route("/v1/embeddings", Inference(gateway, "embedding", parsers), methods=["POST"]),
        Route(MESSAGES, Messages(gateway, parsers), methods=["POST"]),
        Route(COUNT_TOKENS, CountTokens(gateway, parsers), methods=["POST"]),
        Route(RESPONSES, Responses(gateway, parsers), methods=["POST"]),
        Route(RESPONSES + "/{id}", StoredResponses(gateway).read, methods=["GET"]),
        Route(RESPONSES + "/{id}", StoredResponses(gateway).delete, methods=["DELETE"]),
        *Files(gateway).routes(),
        *Batches(gateway).routes(),
        *(Route(path, ScoringInference(gateway, parsers), methods=["POST"]) for path in SCORING_ROUTES),
        Route("/v1/models", info.models, methods=["GET"]),
        Route("/v1/models/{name:path}", info.model, methods=["GET"]),
        Route("/health", info.health, methods=["GET"]),
        Route("/ready", info.report_ready, methods=["GET"]),
        Route("/metrics", info.metrics, methods=["GET"]),
        Route("/openapi.json", info.openapi, methods=["GET"]),
        *Doctor(gateway).routes(),
        *Logs(gateway).routes(),
        *ModelSettings(gateway).routes(),
        *ModelPulls(gateway).routes(),
        *Admin(gateway).routes(),
        *SimulationRoutes(gateway).routes(),
        *Ollama(gateway, parsers).routes(),
        Route("/v1/{rest:path}", Inference(gateway, "other", parsers), methods=["POST"]),
        Route("/v1/{rest:path}", info.unknown_route, methods=["GET", "PUT", "PATCH", "DELETE"]),
    ]
    check_scoped(routes, "/admin/")
    # A bare router: Starlette's exception handlers would respond in another format.
    guard = RequestGuard(gateway.settings, gateway.authorizer, is_loopback=is_loopback)
    app: ASGIApp = ErrorBoundary(Router(routes, redirect_slashes=False), gateway, guard)
    console = ErrorBoundary(Console(gateway, app), gateway, guard)
    origins = [o.strip() for o in gateway.settings.cors_origins.split(",") if o.strip()]
    if origins:
        exposed = [
            "x-request-id",
            "x-client-request-id",
            "retry-after",
            "retry-after-ms",
            "server-timing",
            "x-thaw-ignored",
            USAGE_HEADER,
            "x-thaw-queue-position",
            *(f"x-ratelimit-{part}-{what}" for part in ("limit", "remaining", "reset") for what in ("requests", "tokens")),
        ]
        app = CORSMiddleware(app, allow_origins=origins, allow_methods=["*"], allow_headers=["*"], expose_headers=exposed)
    return RequestIds(_route_console(console, app))


def _route_console(console: ASGIApp, others: ASGIApp) -> ASGIApp:
    """Send requests below /ui to the console, which no other origin may use."""

    async def dispatch(scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        app = console if path == CONSOLE_ROOT or path.startswith(f"{CONSOLE_ROOT}/") else others
        await app(scope, receive, send)

    return dispatch


def _listen(settings: GatewaySettings) -> socket.socket:
    if settings.gateway_socket is not None:
        inherited = socket.socket(fileno=settings.gateway_socket)
        inherited.setblocking(False)
        return inherited
    family = socket.AF_INET6 if ":" in settings.gateway_host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((settings.gateway_host, settings.gateway_port))
        listener.listen(2048)
    except OSError:
        listener.close()
        raise
    listener.setblocking(False)
    return listener


def _body_limits(settings: GatewaySettings) -> BodyLimits:
    counts = RequestLimits(
        prompts=settings.max_prompts,
        choices=settings.max_choices,
        messages=settings.max_messages,
        content_parts=settings.max_content_parts,
        tools=settings.max_tools,
        stops=settings.max_stops,
        biases=settings.max_logit_biases,
    )
    return BodyLimits(settings.max_body_values, counts)


def _connection_limits(settings: GatewaySettings) -> ConnectionLimits:
    """Build the limits; raise the limit of open files as far as needed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = settings.max_connections + _OTHER_OPEN_FILES
    files = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < files:
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))
    return ConnectionLimits(
        connections=max(1, min(settings.max_connections, files - _OTHER_OPEN_FILES)),
        per_address=settings.max_connections_per_address,
        head_bytes=settings.max_header_bytes,
        headers=settings.max_headers,
        head_timeout=settings.header_timeout,
        write_timeout=settings.write_timeout,
    )


async def app(settings: GatewaySettings, stop: asyncio.Event) -> int:
    """Serve until `stop` is set (0) or the mesh is lost (1)."""
    try:
        listener = _listen(settings)
    except OSError as e:
        where = f"{settings.gateway_host}:{settings.gateway_port}"
        sys.stderr.write(f"gateway: cannot listen on {where}: {e.strerror}; choose another with THAW_GATEWAY_PORT\n")
        return 1
    mesh, metrics = Mesh(settings, "gateway"), Metrics()
    gateway = Gateway(mesh, settings, RequestLog(mesh, metrics), is_exposed=is_exposed(settings, listener))
    metrics.observe(gateway.dispatcher, gateway.admission, gateway.held_admission)
    try:
        mesh.listen(subjects.ALL_NODE_STATUS, NodeStatus, gateway.on_status)
        mesh.listen(subjects.ALL_NODE_CHANGES, NodeChanges, gateway.on_changes)
        mesh.respond(subjects.gateway_control(gateway.id), GATEWAY_CONTROL, MoveRequestHandler(gateway).handle, concurrent=True)
        mesh.respond(subjects.gateway_limits(gateway.id), LEASE_LIMITS, gateway.rate_limits.on_lease)
        mesh.listen(subjects.GATEWAY_PRESENT, GatewayPresent, gateway.rate_limits.on_presence)
        mesh.listen(subjects.LOAD_FAILED, LoadFailed, gateway.on_load_failed)
        return await _serve(gateway, listener, stop)
    finally:
        listener.close()
        await mesh.stop()
        metrics.close()


async def _join(gateway: Gateway, group: asyncio.TaskGroup) -> None:
    """Connect to the mesh, however long it takes.

    Until then only /health and /ready respond.
    """
    mesh = gateway.mesh
    await mesh.start()
    await gateway.run(group)
    await subscribe_find_request(gateway)
    await subscribe_view_latencies(gateway)
    await subscribe_view_requests(gateway)
    cards = CatalogWatcher(gateway.catalog, gateway.on_model_removed)
    keys = gateway.authorizer.store
    for bucket, copy, own_writes in (
        (catalog_bucket, cards, None),
        (keys_bucket, keys, keys.own_writes),
        (batches_bucket, gateway.batches.mirror, None),
    ):
        following = BucketWatcher(mesh, bucket, copy, own_writes)
        gateway.tasks.append(group.create_task(following.run(), name=bucket.__name__))
        if copy is cards:
            gateway.readiness.catalog_watcher = following
        elif copy is keys:
            gateway.readiness.keys_watcher = following
    await mesh.publish(subjects.STATUS_WANTED, StatusWanted())


async def _serve(gateway: Gateway, listener: socket.socket, stop: asyncio.Event) -> int:
    settings = gateway.settings
    parsers = ParserProcess(_body_limits(settings))
    web = http_app(gateway, parsers, is_loopback=not is_exposed(settings, listener))
    batches = BatchRunner(gateway, web)
    config = uvicorn.Config(
        web,
        http=cast("type[BoundedProtocol]", partial(BoundedProtocol, connections=Connections(_connection_limits(settings)))),
        loop="none",
        ws="none",  # a library that is installed would take connections from their limits
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        # Its default believes the X-Forwarded-For of every program on this machine.
        proxy_headers=bool(settings.trusted_proxies),
        forwarded_allow_ips=trusted_peers(settings.trusted_proxies),
        timeout_keep_alive=settings.idle_timeout,
        timeout_graceful_shutdown=int(settings.drain_timeout + _FLUSH_TIMEOUT_S) + 1,
        ssl_certfile=settings.tls_certificate,
        ssl_keyfile=settings.tls_key,
    )
    if fault := _load_tls(config):
        sys.stderr.write(f"gateway: cannot use TLS: {fault}; check THAW_TLS_CERTIFICATE and THAW_TLS_KEY\n")
        return 1
    server = HttpServer(config, listener)
    async with asyncio.TaskGroup() as group:
        serving = group.create_task(server.serve(), name="http")
        log.info("listening", extra={"host": settings.gateway_host, "port": listener.getsockname()[1], "gateway": gateway.id})
        gateway.authorizer.note_configured()
        _warn_about_access(gateway)
        report_ready()
        background = [
            group.create_task(_join(gateway, group), name="join"),
            group.create_task(gateway.request_log.run(), name="traces"),
            group.create_task(batches.run(), name="batches"),
            group.create_task(collect_when_idle(server.activity), name="garbage"),
            group.create_task(report_health(partial(_find_faults, gateway)), name="health"),
        ]
        start_collecting_rarely()
        await wait_for_first(stop, gateway.mesh.lost)
        lost = gateway.mesh.lost.is_set()
        await _finish(gateway, server, serving)
        await parsers.close()
        await end(*background, *gateway.tasks)
    return 1 if lost else 0


async def _find_faults(gateway: Gateway) -> str:
    return "; ".join(gateway.readiness.not_ready_reasons())


def _load_tls(config: uvicorn.Config) -> str:
    """Load the certificate and the key, if there are any, and return what is wrong with them."""
    if config.ssl_keyfile is not None and config.ssl_certfile is None:
        return "the key has no certificate"
    files = [Path(file) for file in (config.ssl_certfile, config.ssl_keyfile) if file is not None]
    for file in files:  # the error of loading names none
        try:
            file.open("rb").close()
        except OSError as e:
            return f"{file}: {e.strerror}"
    try:
        config.load()
    except OSError as e:
        return f"{' with '.join(map(str, files))}: {e.strerror}"
    return ""


def _warn_about_access(gateway: Gateway) -> None:
    authorizer, where = gateway.authorizer, {"host": gateway.settings.gateway_host}
    if not authorizer.guards_admin and authorizer.is_exposed:
        log.warning("admin API is disabled until THAW_ADMIN_KEY is set or the mesh has an admin key", extra=where)
    elif not authorizer.guards_admin:
        log.warning("admin API needs no key: any program on this machine administers the mesh; set THAW_ADMIN_KEY")
    if authorizer.is_exposed and gateway.settings.require_key is False and not authorizer.configured:
        log.warning(
            "THAW_REQUIRE_KEY=false: other machines may send inference requests without a key while none exists", extra=where
        )


async def _finish(gateway: Gateway, server: HttpServer, serving: asyncio.Task[None]) -> None:
    gateway.begin_closing()
    server.request_stop()
    if not gateway.mesh.lost.is_set():
        await asyncio.wait([serving], timeout=gateway.settings.drain_timeout)
    gateway.end_all()
    await asyncio.wait([serving])
    await gateway.settle(_FLUSH_TIMEOUT_S)
    with contextlib.suppress(TimeoutError, NatsError):
        async with asyncio.timeout(_FLUSH_TIMEOUT_S):
            if gateway.readiness.has_joined:
                await gateway.rate_limits.announce(leaving=True)
            await asyncio.gather(gateway.request_log.flush(_FLUSH_TIMEOUT_S), gateway.objectives.flush(), gateway.usage.flush())
    gateway.usage.close()
