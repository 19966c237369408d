"""Contract of every engine with nodeagents and gateways.

The same suite runs against the stub engine and the builtin engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from shared.contracts import subjects
from shared.contracts.base import Done
from shared.contracts.engine import DrainEngine, EngineReport, EngineStart, PingEngine
from shared.contracts.inference import CancelInfer, InferChunk, InferFinished, InferStarted
from shared.errors import InstanceBusy, Unreachable
from shared.settings import CommonSettings
from tests.integration.engine.processes import exited, forked
from tests.support.engines import Engines, Stream, ZygoteProcess
from tests.support.paced_zygote import MODULE, Pace
from tests.support.patient_mesh import PatientMesh
from tests.support.segments import FakeLoader, card_of
from tests.support.servers import NatsServer
from thaw.demo.models import make_demo_model

QUICK: dict[str, Any] = {"prompt": "abc", "max_tokens": 5, "temperature": 0}
SLOW: dict[str, Any] = {"prompt": "abc", "max_tokens": 60, "temperature": 0, "ignore_eos": True}
"""A request that lasts for half a minute while `Pace.slowed` holds."""
STUB = {"tokens": 60}
STEP_S = 0.5


@dataclass
class Running:
    engines: Engines
    start: EngineStart
    pid: int
    exit_status: Callable[[], Awaitable[int]]
    pace: Pace

    @property
    def name(self) -> str:
        return self.start.instance_id

    async def control(self, command: DrainEngine | CancelInfer) -> Done:
        return await self.engines.mesh.request(subjects.engine_control(self.name), command, Done)

    async def ask(self, body: dict[str, Any]) -> Stream:
        return await self.engines.ask(self.name, "completion", **body)


@pytest.fixture(scope="module")
def zygote() -> Iterator[ZygoteProcess]:
    with tempfile.TemporaryDirectory(prefix="thaw-z-") as directory:
        process = ZygoteProcess(Path(directory), MODULE)
        yield process
        process.close()


@pytest.fixture(params=["stub", "builtin"])
async def engine(request: pytest.FixtureRequest, nats_server: NatsServer, tmp_path: Path) -> AsyncIterator[Running]:
    mesh = PatientMesh(CommonSettings(nats_url=SecretStr(nats_server.url)), "test")
    await mesh.start()
    engines = Engines(mesh, f"n-{os.getpid()}-{abs(hash(request.node.nodeid)) % 10**6}", nats_server.url, tmp_path)
    await engines.start()
    loader = FakeLoader(mesh, engines.node)
    await loader.start()
    card = card_of(make_demo_model(tmp_path / "model", "test"), engine_args={} if request.param == "builtin" else {"stub": STUB})
    pace = Pace(tmp_path)
    start = engines.paced(card, pace)
    pid, client = 0, None
    exit_status: Callable[[], Awaitable[int]]
    try:
        if request.param == "builtin":
            client = await request.getfixturevalue("zygote").connect()
            pid = await forked(client, start)
            exit_status = partial(exited, client, pid)
        else:
            process = engines.spawn(start, "tests.support.stub_engine")
            pid, exit_status = process.pid, lambda: asyncio.to_thread(process.wait, 60)
        report = await engines.settled(start.instance_id)
        assert report.state == "ready", report.error
        yield Running(engines, start, pid, exit_status, pace)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL) if pid else None
        if client is not None:
            await client.close()
        engines.close()
        loader.close()
        await mesh.stop()


async def test_engine_reports_status_and_answers_a_ping(engine: Running) -> None:
    report = await engine.engines.mesh.request(subjects.engine_control(engine.name), PingEngine(), EngineReport)
    assert (report.state, report.pid, report.progress) == ("ready", engine.pid, 1.0)
    assert report.phases
    assert report.load.active == 0
    seen = len(engine.engines.reports[engine.name])
    await engine.engines.reported(engine.name, lambda _: len(engine.engines.reports[engine.name]) > seen + 1)


async def test_stream_is_numbered_and_ends_once(engine: Running) -> None:
    stream = await engine.ask(QUICK)
    await stream.last()
    assert [r.seq for r in stream.replies] == list(range(len(stream.replies)))
    assert isinstance(stream.replies[0], InferStarted)
    assert all(isinstance(r, InferChunk) for r in stream.replies[1:-1])
    last = stream.replies[-1]
    assert isinstance(last, InferFinished)
    assert last.usage.completion_tokens == len(stream.tokens())
    assert stream.finish() in ("stop", "length")
    assert stream.text()


async def test_cancelling_is_harmless_and_silent(engine: Running) -> None:
    await engine.control(CancelInfer(request_id="nobody"))
    with engine.pace.slowed(STEP_S):
        stream = await engine.ask(SLOW)
        await stream.until(lambda r: any(isinstance(m, InferChunk) for m in r))
        await engine.control(CancelInfer(request_id=stream.request_id))
    await engine.engines.reported(engine.name, lambda r: r.load.completed > 0 or r.load.generated_tokens > 0)
    other = await engine.ask(QUICK)
    await other.last()
    assert isinstance(stream.replies[-1], InferChunk)


async def test_a_busy_engine_stays_and_then_drains(engine: Running) -> None:
    with engine.pace.slowed(STEP_S):
        stream = await engine.ask(SLOW)
        await stream.until(lambda r: any(isinstance(m, InferChunk) for m in r))
        with pytest.raises(InstanceBusy):
            await engine.control(DrainEngine(only_if_idle=True))
        await engine.control(DrainEngine())
    assert isinstance(await stream.last(), InferFinished)
    await engine.engines.reported(engine.name, lambda r: r.state == "stopped")
    assert await engine.exit_status() == 0
    with pytest.raises(Unreachable):
        await engine.control(DrainEngine())


async def test_idle_engine_exits_immediately_on_drain(engine: Running) -> None:
    await engine.control(DrainEngine(only_if_idle=True))
    assert await engine.exit_status() == 0


async def test_sigterm_ends_the_engine_cleanly(engine: Running) -> None:
    os.kill(engine.pid, signal.SIGTERM)
    assert await engine.exit_status() == 0
    await engine.engines.reported(engine.name, lambda r: r.state == "stopped")


def test_the_spec_must_be_readable(tmp_path: Path) -> None:
    nonsense = tmp_path / "spec.json"
    nonsense.write_text("{}")
    done = subprocess.run([sys.executable, "-m", "services.engine", str(nonsense)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "spec.json" in done.stderr
