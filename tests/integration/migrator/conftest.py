"""Migrators on real NATS, with fake engines and a fake gateway."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from pydantic import SecretStr

from services.migrator.app import run
from services.migrator.settings import MigratorSettings
from shared.contracts import subjects
from shared.contracts.base import Done, Message
from shared.contracts.engine import ENGINE_CONTROL, EngineControl
from shared.contracts.migration import (
    GATEWAY_CONTROL,
    ForgetResume,
    ListRequests,
    MigrationRecord,
    MoveRequest,
    PrepareResume,
    ReadTokens,
    RequestMoved,
    RequestsListed,
    ResumePrepared,
    RunningChoice,
    RunningRequest,
    TokensRead,
)
from shared.errors import Conflict, InvalidRequest, NotFound
from shared.messaging import Mesh, Responder
from shared.messaging.streams import migrations_bucket
from shared.telemetry.ids import SystemIds
from tests.support.servers import NatsServer

RATE = 100.0


@dataclass
class FakeEngine:
    """An engine that serves `requests`, each with its start time.

    It computes preparations at once, unless `hold` exists and is not set.
    """

    site: Site
    instance_id: str
    requests: dict[str, float] = field(default_factory=dict)
    prepared: dict[str, int] = field(default_factory=dict)
    forgotten: list[str] = field(default_factory=list)
    hold: asyncio.Event | None = None
    preparing: asyncio.Event = field(default_factory=asyncio.Event)
    revision: str = "r"
    responder: Responder | None = None

    async def start(self) -> None:
        subject = subjects.engine_control(self.instance_id)
        self.responder = self.site.mesh.respond(subject, ENGINE_CONTROL, self.answer, concurrent=True)
        await self.responder.start()

    async def die(self) -> None:
        assert self.responder is not None
        await self.responder.stop()

    def running(self, name: str) -> RunningRequest:
        return RunningRequest(
            request_id=name,
            gateway_id="g",
            prompt_tokens=50,
            generated_tokens=self.generated(name),
            tokens_per_second=RATE,
            traceparent=f"00-{'a' * 32}-{'b' * 16}-01",
        )

    def generated(self, name: str) -> int:
        return int((time.monotonic() - self.requests[name]) * RATE)

    async def answer(self, message: EngineControl) -> Message:
        match message:
            case ListRequests():
                return RequestsListed(requests=tuple(map(self.running, self.requests)))
            case ReadTokens(request_id=name):
                if name not in self.requests:
                    raise NotFound("over")
                choice = RunningChoice(token_ids=tuple(range(self.generated(name))))
                return TokensRead(running=self.running(name), prompt_token_ids=(tuple(range(50)),), choices=(choice,))
            case PrepareResume():
                self.preparing.set()
                if message.revision != self.revision:
                    raise Conflict("another revision")
                if self.hold is not None:
                    await self.hold.wait()
                total = sum(map(len, message.sequences))
                new = max(0, total - self.prepared.get(message.prepared, 0))
                self.prepared[message.prepared] = total
                return ResumePrepared(tokens=new, took_ms=1.0)
            case ForgetResume(prepared=name):
                self.prepared.pop(name, None)
                self.forgotten.append(name)
                return Done()
        raise InvalidRequest(message.kind)


@dataclass
class Site:
    mesh: Mesh
    settings: MigratorSettings
    engines: dict[str, FakeEngine] = field(default_factory=dict)
    moves: list[MoveRequest] = field(default_factory=list)
    migrators: list[tuple[asyncio.Event, asyncio.Task[int]]] = field(default_factory=list)
    processes: list[asyncio.subprocess.Process] = field(default_factory=list)

    async def engine(self, instance_id: str, *requests: str) -> FakeEngine:
        engine = self.engines[instance_id] = FakeEngine(self, instance_id, {r: time.monotonic() for r in requests})
        await engine.start()
        return engine

    async def move(self, order: MoveRequest) -> Message:
        """Do a gateway's part of a migration."""
        self.moves.append(order)
        source, destination = self.engines[order.source_instance], self.engines[order.instance_id]
        if order.request_id not in source.requests:
            raise NotFound("over")
        tokens = source.generated(order.request_id)
        base, _, number = order.request_id.rpartition("-")
        destination.requests[f"{base}-{int(number) + 1}"] = source.requests.pop(order.request_id)
        destination.prepared.pop(order.prepared, None)
        return RequestMoved(instance_id=order.instance_id, tokens=tokens, pause_ms=5.0)

    def migrator(self, **changes: object) -> None:
        """Run one more migrator process's worth of work, as a task."""
        stop = asyncio.Event()
        task = asyncio.create_task(run(self.settings.model_copy(update=changes), stop))
        self.migrators.append((stop, task))

    async def process(self, name: str) -> asyncio.subprocess.Process:
        environment = {"THAW_NATS_URL": self.settings.nats_url.get_secret_value(), "THAW_MIGRATOR_NAME": name}
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "services.migrator",
            env=os.environ | environment,
            cwd=Path(__file__).parents[3],
            stderr=asyncio.subprocess.DEVNULL,
        )
        self.processes.append(process)
        return process

    async def order(self, number: int = 1, request: str | None = None, source: str = "a", destination: str = "b") -> str:
        record = MigrationRecord(
            migration_id=f"m-{number}",
            token=number,
            model="m",
            revision="r",
            source_instance=source,
            source_node="n1",
            instance_id=destination,
            node="n2",
            request_id=request,
            created=time.time(),
        )
        bucket = await migrations_bucket(self.mesh.nc.jetstream())
        await bucket.create(record.migration_id, record.model_dump_json().encode())
        return record.migration_id

    async def record(self, key: str) -> MigrationRecord:
        bucket = await migrations_bucket(self.mesh.nc.jetstream(timeout=60))  # the server may not run for seconds
        return MigrationRecord.model_validate_json((await bucket.get(key)).value or b"")

    async def over(self, key: str, within: float = 60.0) -> MigrationRecord:
        await self.until(lambda: self._is(key, lambda r: r.over), within)
        return await self.record(key)

    async def owned(self, key: str) -> str:
        await self.until(lambda: self._is(key, lambda r: bool(r.owner)))
        return (await self.record(key)).owner

    async def _is(self, key: str, condition: Callable[[MigrationRecord], bool]) -> bool:
        return condition(await self.record(key))

    async def until(self, condition: Callable[[], Awaitable[bool]], within: float = 60.0) -> None:
        async with asyncio.timeout(within):
            while not await condition():  # noqa: ASYNC110 - the condition is in other processes
                await asyncio.sleep(0.02)

    async def close(self) -> None:
        for stop, _ in self.migrators:
            stop.set()
        await asyncio.gather(*(task for _, task in self.migrators), return_exceptions=True)
        for process in self.processes:
            if process.returncode is None:
                process.kill()
            await process.wait()


@pytest.fixture(scope="session", autouse=True)
def tracing() -> None:
    """Give spans ids, without an exporter."""
    if not isinstance(trace.get_tracer_provider(), TracerProvider):
        trace.set_tracer_provider(TracerProvider(id_generator=SystemIds()))


@pytest.fixture
async def site(own_nats: NatsServer) -> AsyncIterator[Site]:
    settings = MigratorSettings(nats_url=SecretStr(own_nats.url))
    mesh = Mesh(settings, "test")
    await mesh.start()
    site = Site(mesh, settings)
    await mesh.respond(subjects.gateway_control("g"), GATEWAY_CONTROL, site.move, concurrent=True).start()
    await migrations_bucket(mesh.nc.jetstream())
    yield site
    await site.close()
    await mesh.stop()
