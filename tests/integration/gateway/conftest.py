"""A gateway in a task, on real NATS, with fake engines behind it."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import SecretStr, TypeAdapter

from services.gateway.adapters import idempotency_store, usage_meter
from services.gateway.app import app
from services.gateway.idempotency import abandoned, idempotent_request
from services.gateway.settings import GatewaySettings
from shared.contracts import subjects
from shared.contracts.admin import ADMIN_REQUEST, AddModels, AdminRequest, ClusterView, ModelsAdded
from shared.contracts.base import Done, Message
from shared.contracts.models import ModelCard
from shared.contracts.usage import ReportUsage
from tests.integration.gateway.usage_ledger import Ledger
from tests.support.fake_engine import FakeNode, card_of
from tests.support.nats_accounts import NatsAccount, NatsAccounts
from tests.support.servers import NatsServer, kept_port

CARDS = (
    card_of("alpha", aliases=("a", "org/alpha")),
    card_of("beta", queue={"max_waiting": 2, "timeout": 30}),
    card_of("hasty", queue={"max_waiting": 8, "timeout": 0.5}),
    card_of("vectors", task="embed"),
)


def _trust(settings: GatewaySettings) -> ssl.SSLContext | bool:
    return ssl.create_default_context(cafile=str(settings.tls_certificate)) if settings.tls_certificate else False


class Served:
    """A running gateway.

    Attributes:
        stop: Shuts it down as SIGTERM does.
    """

    def __init__(self, settings: GatewaySettings) -> None:
        self.settings = settings
        scheme = "https" if settings.tls_certificate else "http"
        self.base = f"{scheme}://127.0.0.1:{settings.gateway_port}"
        self.stop = asyncio.Event()
        self.task = asyncio.create_task(app(settings, self.stop))
        self.http = httpx.AsyncClient(base_url=self.base, timeout=60, verify=_trust(settings))

    async def until_ready(self) -> None:
        async with asyncio.timeout(60):
            while True:
                if self.task.done():
                    raise RuntimeError(f"the gateway ended: {self.task.result()}")
                with contextlib.suppress(httpx.TransportError):
                    if (await self.http.get("/ready")).status_code == 200:
                        return
                await asyncio.sleep(0.02)

    async def close(self) -> int:
        self.stop.set()
        async with asyncio.timeout(60):
            status = await self.task
        await self.http.aclose()
        return status


@pytest.fixture(scope="session")
def nats_accounts() -> Iterator[NatsAccounts]:
    accounts = NatsAccounts()
    yield accounts
    accounts.close()


@pytest.fixture
def own_nats(request: pytest.FixtureRequest, nats_accounts: NatsAccounts) -> Iterator[NatsServer | NatsAccount]:
    """Give each test empty streams: an account, or a server.

    It is a server where the test is marked with `own_nats_server`, or its module sets
    `MAX_PAYLOAD`, the largest message.
    """
    max_payload = getattr(request.module, "MAX_PAYLOAD", None)
    if max_payload is None and request.node.get_closest_marker("own_nats_server") is None:
        yield nats_accounts.take()
        return
    server = NatsServer(max_payload=max_payload or "8MB")
    yield server
    server.close()


ServeFn = Callable[..., AbstractAsyncContextManager[Served]]


@pytest.fixture
def serve(own_nats: NatsServer, tmp_path: Path) -> ServeFn:
    @asynccontextmanager
    async def serving(**settings: Any) -> AsyncIterator[Served]:
        with kept_port() as kept:
            defaults: dict[str, Any] = {
                "nats_url": SecretStr(own_nats.url),
                "gateway_port": kept.getsockname()[1],
                "drain_timeout": 2.0,
                "home": tmp_path / "home",
            }
            fields: dict[str, Any] = defaults | settings
            served = Served(GatewaySettings(**fields))
            try:
                await served.until_ready()
                yield served
            finally:
                await served.close()

    return serving


@pytest.fixture
async def node(own_nats: NatsServer) -> AsyncIterator[FakeNode]:
    node = FakeNode(own_nats.url)
    await node.start(*CARDS)
    yield node
    await node.stop()


@pytest.fixture
async def gateway(node: FakeNode, serve: ServeFn) -> AsyncIterator[Served]:
    async with serve() as served:
        await until_listed(served, CARDS)
        yield served


async def until_listed(served: Served, cards: tuple[ModelCard, ...]) -> None:
    """Wait until the gateway has read every card."""
    await until(lambda: _listed(served, len(cards)))


async def until_running(served: Served, model: str) -> None:
    """Wait until the gateway knows a ready instance of the model."""
    await until(lambda: _running(served, model))


async def _running(served: Served, model: str) -> bool:
    return any(m["name"].startswith(model) for m in (await served.http.get("/api/ps")).json()["models"])


async def _listed(served: Served, count: int) -> bool:
    return len((await served.http.get("/v1/models")).json()["data"]) >= count


async def until(true: Callable[[], Awaitable[bool]], within: float = 60.0) -> None:
    async with asyncio.timeout(within):
        while not await true():  # noqa: ASYNC110 - the condition is behind HTTP: there is no event to await
            await asyncio.sleep(0.02)


def chat(model: str = "alpha", **fields: Any) -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": "Hi"}]} | fields


class Scheduler:
    """Answers admin requests with a view that tests change."""

    def __init__(self) -> None:
        self.view = ClusterView(scheduler="s", epoch=1)
        self.asked: list[AdminRequest] = []

    async def answer(self, request: AdminRequest) -> Message:
        self.asked.append(request)
        if isinstance(request, AddModels):
            return ModelsAdded(changed=tuple(spec.name for spec in request.specs))
        return self.view if request.kind == "view" else Done()


@pytest.fixture
async def scheduler(node: FakeNode) -> Scheduler:
    found = Scheduler()
    await node.mesh.respond(subjects.ADMIN, ADMIN_REQUEST, found.answer).start()
    return found


@pytest.fixture
async def guarded(node: FakeNode, serve: ServeFn) -> AsyncIterator[Served]:
    async with serve(admin_key="root") as served:
        await until_listed(served, CARDS)
        yield served


@pytest.fixture
async def pair(node: FakeNode, serve: ServeFn) -> AsyncIterator[tuple[Served, Served]]:
    async with serve(admin_key="root") as one, serve(admin_key="root") as two:
        await until_listed(one, CARDS)
        await until_listed(two, CARDS)
        yield one, two


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use leases of one second instead of five."""
    for module in (idempotent_request, abandoned):
        monkeypatch.setattr(module, "LEASE_S", 1.0)
    monkeypatch.setattr(idempotency_store, "RENEW_S", 0.25)
    monkeypatch.setattr(idempotent_request, "RENEW_S", 0.25)


@pytest.fixture
async def ledger(node: FakeNode, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Ledger]:
    monkeypatch.setattr(usage_meter, "REPORT_INTERVAL_S", 0.05)
    ledger = Ledger()
    await node.mesh.respond(subjects.USAGE, TypeAdapter(ReportUsage), ledger.record).start()
    await node.mesh.flush()
    yield ledger
    assert len(ledger.alone) == len(set(ledger.alone)), "only one gateway took over"
