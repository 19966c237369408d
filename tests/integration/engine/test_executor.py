"""An executor: several engines in one process, as dedicated ones would answer."""

from __future__ import annotations

import asyncio
import itertools
import os
import shutil
import signal
import statistics
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from shared.contracts import subjects
from shared.contracts.base import Done
from shared.contracts.engine import DrainEngine, EngineReport, EngineStart, PingEngine
from shared.contracts.executor import (
    CURRENT_BYTES,
    AttachInstance,
    DetachInstance,
    ExecutorReport,
    ExecutorStart,
    InstanceAttached,
    InstanceDetached,
    PingExecutor,
    parse_current,
)
from shared.contracts.inference import CancelInfer, InferChunk, InferFailed, InferFinished, InferStarted
from shared.contracts.loader import adapter_holder
from shared.contracts.models import ModelCard
from shared.contracts.phases import Phase
from shared.errors import EngineFailed, Unreachable
from tests.integration.engine.processes import FINITE, SLOW, exited, forked, hear_fork, until_streaming
from tests.support.adapters import adapter_card, write_adapter
from tests.support.engines import Engines, ZygoteClient
from tests.support.paced_zygote import Pace
from tests.support.segments import FakeLoader, card_of

_numbers = itertools.count(1)
_WITHIN_S = 60.0
_GROWTH_BYTES = 1 << 20
"""Most bytes that 20 attaches may leave behind."""
ASKED: dict[str, Any] = {"prompt": "once upon a time", "max_tokens": 24, "temperature": 0, "ignore_eos": True}


class RunningExecutor:
    """An executor that the zygote forked."""

    def __init__(self, engines: Engines, client: ZygoteClient, pace: Pace) -> None:
        self.engines, self.client, self._pace = engines, client, pace
        self.name = f"x{os.getpid()}-{next(_numbers)}"
        self.current = engines.directory / f"{self.name}.current"
        self.pid = 0

    async def start(self) -> None:
        start = ExecutorStart(
            executor_id=self.name,
            node=self.engines.node,
            device="cpu:0",
            log_path=str(self.engines.directory / f"{self.name}.log"),
            current_path=str(self.current),
            environment={"THAW_NATS_URL": self.engines.nats_url, "THAW_ENGINE_THREADS": "1", **self._pace.environment},
        )
        self.client.send(start.model_dump_json().encode())
        self.pid = (await hear_fork(self.client)).pid
        async with asyncio.timeout(_WITHIN_S):
            while True:
                try:
                    await self.report()
                    return
                except Unreachable:
                    await asyncio.sleep(0.02)  # nothing announces an executor without models

    async def report(self) -> ExecutorReport:
        return await self.engines.mesh.request(subjects.executor_control(self.name), PingExecutor(), ExecutorReport)

    async def attach(self, start: EngineStart) -> str:
        reply = await self.engines.mesh.request(subjects.executor_control(self.name), AttachInstance(start=start), InstanceAttached)
        assert reply.pid == self.pid
        report = await self.engines.settled(start.instance_id)
        assert report.state == "ready", report.error
        return start.instance_id

    async def detach(self, instance_id: str) -> InstanceDetached:
        return await self.engines.mesh.request(
            subjects.executor_control(self.name), DetachInstance(instance_id=instance_id), InstanceDetached
        )

    def maps(self) -> str:
        return Path(f"/proc/{self.pid}/maps").read_text()


@pytest.fixture
async def executor(engines: Engines, loader: FakeLoader, client: ZygoteClient, pace: Pace) -> AsyncIterator[RunningExecutor]:
    executor = RunningExecutor(engines, client, pace)
    await executor.start()
    yield executor
    try:
        os.kill(executor.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    await exited(client, executor.pid)


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Three models: two of one architecture, and one of another shape."""
    from thaw.demo.models import make_demo_model

    root = tmp_path_factory.mktemp("shared")
    sizes = [("test", 1), ("test", 2), ("5m", 3)]
    return [make_demo_model(root / f"m{seed}", size, seed) for size, seed in sizes]


async def test_models_of_one_executor_answer_as_dedicated_engines(
    executor: RunningExecutor, engines: Engines, client: ZygoteClient, directories: list[Path]
) -> None:
    cards = [card_of(directory) for directory in directories]
    dedicated = []
    for card in cards:
        start = engines.spec(card)
        pid = await forked(client, start)
        assert (await engines.settled(start.instance_id)).state == "ready"
        dedicated.append((await engines.answer(start.instance_id, "completion", **ASKED)).tokens())
        os.kill(pid, signal.SIGKILL)
        await exited(client, pid)
    assert dedicated[0] != dedicated[1], "the models differ"

    names = [await executor.attach(engines.spec(card)) for card in cards]
    assert (await executor.report()).instances == tuple(names)
    for name in names:
        phases = {s.phase for s in engines.reports[name][-1].phases}
        assert Phase.LIBRARIES not in phases, "nothing was imported"
    alone = [(await engines.answer(name, "completion", **ASKED)).tokens() for name in names]
    assert alone == dedicated
    streams = [await engines.ask(name, "completion", **ASKED) for name in names for _ in range(2)]
    for stream in streams:
        assert isinstance(await stream.last(), InferFinished)
    assert [s.tokens() for s in streams] == [tokens for tokens in dedicated for _ in range(2)]


async def test_end_of_an_instance_is_reported_until_it_is_detached(
    executor: RunningExecutor, engines: Engines, directories: list[Path]
) -> None:
    """The nodeagent may miss the first reports, of which there are up to two."""
    name = await executor.attach(engines.spec(card_of(directories[0])))
    await engines.mesh.request(subjects.engine_control(name), DrainEngine(), Done)
    for _ in range(4):
        await engines.reported(name, lambda r: r.state == "stopped")
        engines.reports[name].clear()
    await executor.detach(name)
    assert name not in (await executor.report()).instances


@dataclass(frozen=True)
class HeldModel:
    """A model that an executor cannot bind before `release`: one of its small files is a FIFO."""

    directory: Path

    @property
    def _fifo(self) -> Path:
        return self.directory / "generation_config.json"

    @classmethod
    def copy(cls, source: Path, directory: Path) -> HeldModel:
        shutil.copytree(source, directory)
        made = cls(directory)
        made._fifo.unlink(missing_ok=True)
        os.mkfifo(made._fifo)
        return made

    async def release(self, content: str = "{}") -> None:
        await asyncio.to_thread(self._fifo.write_text, content)


@pytest.fixture
def held(directories: list[Path], tmp_path: Path) -> HeldModel:
    """A held copy of the first model."""
    return HeldModel.copy(directories[0], tmp_path / "held")


async def begun(executor: RunningExecutor, start: EngineStart) -> EngineReport:
    """Begin to attach a held model, and return its first report that it takes requests."""
    await executor.engines.mesh.request(subjects.executor_control(executor.name), AttachInstance(start=start), InstanceAttached)
    report = await executor.engines.reported(start.instance_id, lambda r: r.accepts_requests or r.state != "loading")
    assert report.state == "loading", report.error
    return report


async def test_requests_join_an_attach_once_the_weights_are_loaded(
    executor: RunningExecutor, engines: Engines, loader: FakeLoader, directories: list[Path], held: HeldModel
) -> None:
    plain = await executor.attach(engines.spec(card_of(directories[0])))
    expected = (await engines.answer(plain, "completion", **ASKED)).tokens()
    loader.hold_data()
    start = engines.spec(card_of(held.directory))
    attaching = asyncio.create_task(begun(executor, start))
    await engines.reported(start.instance_id, lambda r: r.phase is Phase.LOAD)
    assert not any(r.accepts_requests for r in engines.reports[start.instance_id]), "its weights are not loaded"
    loader.release_data()
    await attaching
    streams = [await engines.ask(start.instance_id, "completion", **ASKED) for _ in range(2)]
    refused = await engines.ask(start.instance_id, "embedding", input="a", adapter=card_of(held.directory))
    await engines.reported(start.instance_id, lambda r: r.load.waiting == 3)
    assert not any(s.replies for s in (*streams, refused))
    assert not engines.is_ready(start.instance_id)
    await held.release()
    for stream in streams:
        assert isinstance(await stream.last(), InferFinished)
        assert stream.tokens() == expected
        begin, first = stream.replies[:2]
        assert isinstance(begin, InferStarted)
        assert isinstance(first, InferChunk)
        assert Phase.INIT in {s.phase for s in begin.phases}, "it waited for the model to be bound"
        assert [s.phase for s in first.phases].count(Phase.LOAD) == 1
    last = await refused.last()
    assert isinstance(last, InferFailed)
    assert last.error.code == "invalid_request"
    assert (await engines.settled(start.instance_id)).state == "ready"


async def test_an_attach_that_fails_fails_the_requests_that_joined_it(
    executor: RunningExecutor, engines: Engines, held: HeldModel
) -> None:
    start = engines.spec(card_of(held.directory))
    await begun(executor, start)
    stream = await engines.ask(start.instance_id, "completion", **ASKED)
    await engines.reported(start.instance_id, lambda r: r.load.waiting == 1)
    await held.release("{")
    last = await stream.last()
    assert isinstance(last, InferFailed)
    assert (last.error.code, last.engine_lost) == ("checkpoint_invalid", True)
    assert (await engines.settled(start.instance_id)).state == "failed"
    await executor.detach(start.instance_id)
    assert "thaw-test-" not in executor.maps()


async def test_a_detach_ends_an_attach_and_the_requests_that_joined_it(
    executor: RunningExecutor, engines: Engines, held: HeldModel
) -> None:
    start = engines.spec(card_of(held.directory))
    await begun(executor, start)
    stream, cancelled = [await engines.ask(start.instance_id, "completion", **ASKED) for _ in range(2)]
    await engines.reported(start.instance_id, lambda r: r.load.waiting == 2)
    command = CancelInfer(request_id=cancelled.request_id)
    await engines.mesh.request(subjects.engine_control(start.instance_id), command, Done)
    detaching = asyncio.create_task(executor.detach(start.instance_id))
    last = await stream.last()
    assert isinstance(last, InferFailed)
    assert last.engine_lost
    await held.release()
    await detaching
    assert not cancelled.replies
    assert "thaw-test-" not in executor.maps()


async def test_attaching_and_detaching_leaves_nothing_behind(
    executor: RunningExecutor, engines: Engines, directories: list[Path]
) -> None:
    process = psutil.Process(executor.pid)
    kept = await executor.attach(engines.spec(card_of(directories[2])))
    expected = (await engines.answer(kept, "completion", **ASKED)).tokens()
    sizes: list[int] = []
    for turn in range(100):
        name = await executor.attach(engines.spec(card_of(directories[turn % 2])))
        if turn % 10 == 0:
            await engines.answer(name, "completion", **ASKED)
        assert executor.maps().count("thaw-test-") >= 2
        await executor.detach(name)
        await engines.reported(name, lambda r: r.state == "stopped")
        sizes.append(process.memory_full_info().uss)
    left = {line.split()[-1] for line in executor.maps().splitlines() if "thaw-test-" in line}
    assert len(left) == 1, "only the other model is mapped"
    # The allocator grows in steps, of which each run has one or two. A leak grows all the time.
    quarters = [statistics.median(sizes[first : first + 20]) for first in range(20, 100, 20)]
    assert min(after - before for before, after in itertools.pairwise(quarters)) < _GROWTH_BYTES, [s >> 20 for s in sizes[::10]]
    assert process.num_threads() < 20
    assert (await executor.report()).instances == (kept,)
    assert (await engines.answer(kept, "completion", **ASKED)).tokens() == expected


async def test_detaching_fails_running_requests_and_leaves_other_models_alone(
    executor: RunningExecutor, engines: Engines, directories: list[Path], pace: Pace
) -> None:
    first, second = [await executor.attach(engines.spec(card_of(d))) for d in directories[:2]]
    with pace.slowed():
        stopped, other = [await engines.ask(name, "completion", **body) for name, body in ((first, SLOW), (second, FINITE))]
        await until_streaming(stopped)
        await executor.detach(first)
    assert isinstance(await stopped.last(), InferFailed)
    assert isinstance(await other.last(), InferFinished)
    again = await executor.detach(first)
    assert again.freed_bytes == 0, "repeating the command is harmless"


async def test_repeated_commands_detach_an_instance_once(
    executor: RunningExecutor, engines: Engines, directories: list[Path], pace: Pace
) -> None:
    """A nodeagent that is started again does not know that the first one is carried out."""
    name = await executor.attach(engines.spec(card_of(directories[0])))
    with pace.slowed():
        await until_streaming(await engines.ask(name, "completion", **SLOW))
        await asyncio.gather(*(executor.detach(name) for _ in range(3)))
    assert "thaw-test-" not in executor.maps()
    assert (await executor.report()).instances == ()


async def with_adapter(executor: RunningExecutor, directory: Path, tmp_path: Path) -> tuple[str, ModelCard]:
    """Attach a model that has room for an adapter, and return it with the adapter."""
    start = executor.engines.spec(card_of(directory, engine_args={"adapter_cache_bytes": 60_000}))
    return await executor.attach(start), adapter_card(write_adapter(tmp_path / "a", directory), "a")


async def test_a_model_with_an_adapter_is_detached(
    executor: RunningExecutor, engines: Engines, directories: list[Path], tmp_path: Path
) -> None:
    """An unused adapter stays loaded for minutes: `keep_alive` of the model."""
    name, adapter = await with_adapter(executor, directories[0], tmp_path)
    assert isinstance((await engines.answer(name, "completion", adapter=adapter, **ASKED)).replies[-1], InferFinished)
    await engines.reported(name, lambda r: bool(r.load.adapters))
    await executor.detach(name)
    assert "thaw-test-" not in executor.maps()


async def test_a_model_that_loads_an_adapter_is_detached(
    executor: RunningExecutor, engines: Engines, loader: FakeLoader, directories: list[Path], tmp_path: Path
) -> None:
    name, adapter = await with_adapter(executor, directories[0], tmp_path)
    loader.hold_data()
    requested = await engines.ask(name, "completion", adapter=adapter, **ASKED)
    await asyncio.wait_for(loader.held({adapter_holder(name, 1)}), _WITHIN_S)
    await executor.detach(name)
    assert isinstance(await requested.last(), InferFailed)
    assert "thaw-test-" not in executor.maps()
    loader.release_data()


async def test_detaching_does_not_wait_for_the_deadline_of_an_earlier_command(
    executor: RunningExecutor, engines: Engines, directories: list[Path]
) -> None:
    name = await executor.attach(engines.spec(card_of(directories[0])))
    await engines.mesh.request(subjects.engine_control(name), PingEngine(deadline_ms=3_600_000), EngineReport)
    await executor.detach(name)
    assert "thaw-test-" not in executor.maps()
    log = (engines.directory / f"{executor.name}.log").read_text()
    assert name in log
    assert "error" not in log.lower(), "an orderly stop is no failure"


async def test_short_request_is_answered_during_a_long_batch_of_another_model(
    executor: RunningExecutor, engines: Engines, directories: list[Path], pace: Pace
) -> None:
    busy, other = [await executor.attach(engines.spec(card_of(d))) for d in directories[:2]]
    with pace.slowed():
        long = [await engines.ask(busy, "completion", **SLOW) for _ in range(8)]
        await until_streaming(long[0])
        short = await engines.answer(other, "completion", prompt="a", max_tokens=1, temperature=0)
        assert len(short.tokens()) == 1
        assert not any(s.replies and isinstance(s.replies[-1], InferFinished) for s in long), "it did not wait for the batch"


async def test_killed_executor_names_the_model_that_was_computing(
    executor: RunningExecutor, engines: Engines, client: ZygoteClient, directories: list[Path], pace: Pace
) -> None:
    idle, busy = [await executor.attach(engines.spec(card_of(d))) for d in directories[:2]]
    assert idle != busy
    with pace.slowed():
        stream = await engines.ask(busy, "completion", **SLOW)
        await until_streaming(stream)
        os.kill(executor.pid, signal.SIGKILL)
    assert await exited(client, executor.pid) == -signal.SIGKILL
    name, began_ns = parse_current(executor.current.read_bytes())
    assert name == busy
    assert 0 < began_ns < time.monotonic_ns()
    assert parse_current(busy.encode().ljust(CURRENT_BYTES, b"\0")) == (busy, 0), "of an earlier version"


async def test_model_with_code_of_its_own_is_refused(executor: RunningExecutor, engines: Engines, directories: list[Path]) -> None:
    start = engines.spec(card_of(directories[0], trust_remote_code=True))
    with pytest.raises(EngineFailed, match="never shared"):
        await engines.mesh.request(subjects.executor_control(executor.name), AttachInstance(start=start), InstanceAttached)
    assert (await executor.report()).instances == ()


async def test_sigterm_ends_the_instances_and_the_process(
    executor: RunningExecutor, engines: Engines, client: ZygoteClient, directories: list[Path]
) -> None:
    name = await executor.attach(engines.spec(card_of(directories[0])))
    os.kill(executor.pid, signal.SIGTERM)
    assert await exited(client, executor.pid) == 0
    await engines.reported(name, lambda r: r.state == "stopped")
