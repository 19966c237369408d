"""Wires the gateway: mesh, loop, HTTP server, and the order in which they end.

Stopping: refuse new connections and say so on /ready, let open requests finish (bounded), end the rest with an error, write the last
traces, leave the mesh.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import resource
import socket
import sys
from functools import partial
from typing import cast

import uvicorn
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route, Router
from starlette.types import ASGIApp

from services.gateway.adapters.catalog_watcher import CatalogCopy
from services.gateway.adapters.garbage_collector import collect_when_idle, start_collecting_rarely
from services.gateway.authorization import is_exposed
from services.gateway.handlers.find_request import answer_finds
from services.gateway.handlers.move_request import Mover
from services.gateway.http.endpoints.admin import Admin
from services.gateway.http.endpoints.inference import Generate
from services.gateway.http.endpoints.info import Info
from services.gateway.http.middleware.connection_limits import BoundedProtocol, ConnectionLimits, Connections
from services.gateway.http.middleware.error_boundary import Edge
from services.gateway.http.middleware.request_guard import Guard
from services.gateway.http.middleware.request_id import RequestIds
from services.gateway.http.parsing.parser_process import ParserProcess
from services.gateway.http.server import HttpServer
from services.gateway.loop import Gateway
from services.gateway.settings import GatewaySettings
from services.gateway.telemetry.metrics import Metrics
from services.gateway.telemetry.request_log import Recorder
from shared.contracts import subjects
from shared.contracts.demand import LoadFailed
from shared.contracts.migration import GATEWAY_CONTROL
from shared.contracts.node import NodeStatus, StatusWanted
from shared.messaging import Mesh
from shared.messaging.buckets import BucketWatcher
from shared.messaging.streams import catalog_bucket, keys_bucket
from shared.tasks import end, first

log = logging.getLogger(__name__)
_OTHER_FILES = 256
"""Open files of a gateway besides its connections."""
_LAST_WORDS_S = 2.0


def http_app(gateway: Gateway, parsers: ParserProcess, *, loopback: bool) -> ASGIApp:
    info = Info(gateway)
    routes = [
        Route("/v1/chat/completions", Generate(gateway, "chat", parsers), methods=["POST"]),
        Route("/v1/completions", Generate(gateway, "completion", parsers), methods=["POST"]),
        Route("/v1/embeddings", Generate(gateway, "embedding", parsers), methods=["POST"]),
        Route("/v1/models", info.models, methods=["GET"]),
        Route("/v1/models/{name:path}", info.model, methods=["GET"]),
        Route("/health", info.health, methods=["GET"]),
        Route("/ready", info.ready, methods=["GET"]),
        Route("/metrics", info.metrics, methods=["GET"]),
        Route("/openapi.json", info.openapi, methods=["GET"]),
        *Admin(gateway).routes(),
        Route("/v1/{rest:path}", Generate(gateway, "other", parsers), methods=["POST"]),
        Route("/v1/{rest:path}", info.elsewhere, methods=["GET", "PUT", "PATCH", "DELETE"]),
    ]
    # A bare router: Starlette's own exception handlers would answer in another shape than the Edge.
    app: ASGIApp = Edge(Router(routes, redirect_slashes=False), gateway, Guard(gateway.settings, gateway.keys, loopback=loopback))
    origins = [o.strip() for o in gateway.settings.cors_origins.split(",") if o.strip()]
    if origins:
        exposed = [
            "x-request-id",
            "x-client-request-id",
            "retry-after",
            "retry-after-ms",
            "server-timing",
            "x-thaw-ignored",
            "x-thaw-queue-position",
        ]
        app = CORSMiddleware(app, allow_origins=origins, allow_methods=["*"], allow_headers=["*"], expose_headers=exposed)
    return RequestIds(app)


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


def _is_loopback(listener: socket.socket) -> bool:
    """Whether only this machine reaches the endpoint."""
    if listener.family not in (socket.AF_INET, socket.AF_INET6):
        return True
    return ipaddress.ip_address(listener.getsockname()[0].partition("%")[0]).is_loopback


def _connection_limits(settings: GatewaySettings) -> ConnectionLimits:
    """What the settings say, and as many connections as files may be open; the soft limit of those is often 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = settings.max_connections + _OTHER_FILES
    files = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < files:
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))
    return ConnectionLimits(
        connections=max(1, min(settings.max_connections, files - _OTHER_FILES)),
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
    gateway = Gateway(mesh, settings, Recorder(mesh, metrics), exposed=is_exposed(settings, listener))
    metrics.observe(gateway.dispatcher)
    try:
        mesh.listen(subjects.ALL_NODE_STATUS, NodeStatus, gateway.on_status)
        mesh.respond(subjects.gateway_control(gateway.id), GATEWAY_CONTROL, Mover(gateway).on_control, concurrent=True)
        mesh.listen(subjects.LOAD_FAILED, LoadFailed, gateway.on_load_failed)
        return await _serve(gateway, listener, stop)
    finally:
        listener.close()
        await mesh.stop()
        metrics.close()


async def _join(gateway: Gateway, group: asyncio.TaskGroup) -> None:
    """Connect, waiting for NATS as long as it takes; until then /health and /ready are all that can be answered."""
    mesh = gateway.mesh
    await mesh.start()
    await gateway.run(group)
    await answer_finds(gateway)
    cards = CatalogCopy(gateway.catalog, gateway.on_model_removed)
    for bucket, copy in ((catalog_bucket, cards), (keys_bucket, gateway.keys.store)):
        gateway.tasks.append(group.create_task(BucketWatcher(mesh, bucket, copy).run(), name=bucket.__name__))
    await mesh.publish(subjects.STATUS_WANTED, StatusWanted())


async def _serve(gateway: Gateway, listener: socket.socket, stop: asyncio.Event) -> int:
    settings = gateway.settings
    parsers = ParserProcess(settings.max_body_values)
    server = HttpServer(
        uvicorn.Config(
            http_app(gateway, parsers, loopback=_is_loopback(listener)),
            http=cast("type[BoundedProtocol]", partial(BoundedProtocol, connections=Connections(_connection_limits(settings)))),
            loop="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=settings.idle_timeout,
            timeout_graceful_shutdown=int(settings.drain_timeout + _LAST_WORDS_S) + 1,
            ssl_certfile=settings.tls_certificate,
            ssl_keyfile=settings.tls_key,
        ),
        listener,
    )
    async with asyncio.TaskGroup() as group:
        serving = group.create_task(server.serve(), name="http")
        log.info("listening", extra={"host": settings.gateway_host, "port": listener.getsockname()[1], "gateway": gateway.id})
        gateway.keys.note_configured()
        _warn_of_access(gateway)
        background = [
            group.create_task(_join(gateway, group), name="join"),
            group.create_task(gateway.recorder.run(), name="traces"),
            group.create_task(collect_when_idle(server.activity), name="garbage"),
        ]
        start_collecting_rarely()
        await first(stop, gateway.mesh.lost)
        lost = gateway.mesh.lost.is_set()
        await _finish(gateway, server, serving)
        await parsers.close()
        await end(*background, *gateway.tasks)
    return 1 if lost else 0


def _warn_of_access(gateway: Gateway) -> None:
    keys, where = gateway.keys, {"host": gateway.settings.gateway_host}
    if not keys.guards_admin and keys.exposed:
        log.warning("the admin API is off until THAW_ADMIN_KEY is set, or an admin key is found in the mesh", extra=where)
    elif not keys.guards_admin:
        log.warning("the admin API asks for no key: any program on this machine administers the mesh; set THAW_ADMIN_KEY")
    if keys.exposed and gateway.settings.require_key is False and not keys.configured:
        log.warning("THAW_REQUIRE_KEY=false: other machines may infer without a key as long as none exists", extra=where)


async def _finish(gateway: Gateway, server: uvicorn.Server, serving: asyncio.Task[None]) -> None:
    gateway.begin_closing()
    server.should_exit = True
    if not gateway.mesh.lost.is_set():
        await asyncio.wait([serving], timeout=gateway.settings.drain_timeout)
    gateway.end_all()
    await asyncio.wait([serving])
    await gateway.settle(_LAST_WORDS_S)
    await gateway.recorder.flush(_LAST_WORDS_S)
