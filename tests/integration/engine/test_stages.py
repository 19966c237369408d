"""Groups of stage processes answer as one engine does, and end as a whole."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from shared.contracts import subjects
from shared.contracts.base import Done
from shared.contracts.engine import DrainEngine, EngineExited, EngineReport, EngineStart, PingEngine
from shared.contracts.inference import CancelInfer, Endpoint, InferChunk, InferFailed
from shared.contracts.stages import Stage, split_layers
from tests.integration.engine.processes import SLOW, exited, forked, until_streaming
from tests.support.engines import Engines, Stream, ZygoteClient
from tests.support.paced_zygote import Pace
from tests.support.segments import FakeLoader, card_of

LAYERS = 4


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from thaw.demo.models import Shape, make_demo_model

    shape = Shape(1024, 64, 160, LAYERS, 4, 2, 1024, "float32", 0.0)
    return make_demo_model(tmp_path_factory.mktemp("staged") / "model", shape)


class Group:
    """The engines of a group, the first stage first."""

    def __init__(self, engines: Engines, client: ZygoteClient, loader: FakeLoader) -> None:
        self.engines, self.client, self.loader = engines, client, loader
        self.starts: list[EngineStart] = []
        self.pids: list[int] = []

    async def begin(self, directory: Path, count: int, pace: Pace | None = None) -> None:
        card = card_of(directory)
        for index, layers in enumerate(split_layers(LAYERS, count)):
            start = self.engines.spec(card) if pace is None else self.engines.paced(card, pace)
            stage = Stage(group_id=f"g{os.getpid()}-{id(self)}", index=index, count=count, layers=layers, secret="x" * 43)
            self.starts.append(start.model_copy(update={"stage": stage}))
        # The last stage starts first: the order does not matter.
        self.pids = [await forked(self.client, start) for start in reversed(self.starts)][::-1]

    async def ready(self) -> str:
        for start in self.starts:
            report = await self.engines.settled(start.instance_id)
            assert report.state == "ready", report.error
        return self.starts[0].instance_id

    def states(self) -> list[str]:
        return [self.engines.reports[s.instance_id][-1].state for s in self.starts]

    async def close(self) -> None:
        """Kill what runs, and wait until the zygote has reported all exits."""
        for pid in self.pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        left = set(self.pids)
        while left:
            line = await self.client.hear()
            if isinstance(line, EngineExited):
                left.discard(line.pid)


@pytest.fixture
async def group(engines: Engines, loader: FakeLoader, client: ZygoteClient) -> AsyncIterator[Group]:
    group = Group(engines, client, loader)
    yield group
    await group.close()


REQUESTS: list[tuple[Endpoint, dict[str, Any]]] = [
    ("completion", {"prompt": "Number one says", "max_tokens": 24, "temperature": 0}),
    ("completion", {"prompt": "ab " * 200, "max_tokens": 12, "temperature": 0}),
    ("completion", {"prompt": ["ab", "cd"], "max_tokens": 16, "temperature": 0.8, "seed": 5, "n": 2}),
    ("completion", {"prompt": "sampled", "max_tokens": 24, "temperature": 1.1, "top_p": 0.9, "seed": 11, "presence_penalty": 0.5}),
    (
        "chat",
        {
            "messages": [{"role": "user", "content": "Hello"}],
            "max_tokens": 16,
            "temperature": 0,
            "logprobs": True,
            "top_logprobs": 3,
        },
    ),
]


def logprobs(stream: Stream) -> list[Any]:
    return [d.logprobs for r in stream.replies if isinstance(r, InferChunk) for d in r.choices]


async def answers(engines: Engines, instance: str) -> tuple[list[list[list[int]]], list[Any]]:
    """Return the tokens of all requests at once, and log-probabilities of the last one alone.

    Batching changes no token in float32, but the last bits of log-probabilities.
    """
    streams = await asyncio.gather(*(engines.answer(instance, endpoint, **body) for endpoint, body in REQUESTS))
    endpoint, body = REQUESTS[-1]
    alone = await engines.answer(instance, endpoint, **body)
    assert all(stream.finish() is not None for stream in streams)
    assert alone.tokens() == streams[-1].tokens()
    return [[stream.tokens(i) for i in range(4)] for stream in streams], logprobs(alone)


@pytest.mark.parametrize("count", [2, 4])
async def test_group_gives_the_same_tokens_as_one_engine(group: Group, directory: Path, count: int) -> None:
    single = group.engines.spec(card_of(directory))
    pid = await forked(group.client, single)
    await group.engines.settled(single.instance_id)
    expected = await answers(group.engines, single.instance_id)
    os.kill(pid, signal.SIGKILL)
    await exited(group.client, pid)
    await group.begin(directory, count)
    assert await answers(group.engines, await group.ready()) == expected


async def test_cancelled_and_finished_requests_free_every_stage(group: Group, directory: Path, pace: Pace) -> None:
    await group.begin(directory, 2, pace)
    first = await group.ready()
    later = group.starts[1].instance_id
    with pace.slowed():
        stream = await group.engines.ask(first, "completion", **SLOW)
        await until_streaming(stream)
        report = await group.engines.mesh.request(subjects.engine_control(later), PingEngine(), EngineReport)
        assert report.load.kv_bytes_used > 0
        await group.engines.mesh.request(subjects.engine_control(first), CancelInfer(request_id=stream.request_id), Done)
    await group.engines.answer(first, "completion", prompt="b", max_tokens=3, temperature=0)
    group.engines.reports[later].clear()
    report = await group.engines.reported(later, lambda r: r.load.kv_bytes_used == 0)
    assert report.state == "ready"


@pytest.mark.parametrize("victim", [0, 1, 2])
async def test_group_ends_with_any_of_its_stages(group: Group, directory: Path, victim: int, pace: Pace) -> None:
    await group.begin(directory, 3, pace)
    first = await group.ready()
    with pace.slowed():
        stream = await group.engines.ask(first, "completion", **SLOW)
        await until_streaming(stream)
        os.kill(group.pids[victim], signal.SIGKILL)
    for index, start in enumerate(group.starts):
        if index != victim:
            report = await group.engines.reported(start.instance_id, lambda r: r.state == "failed")
            assert report.error is not None
            assert "so the group ends" in report.error.message
    if victim != 0:
        last = await stream.last()
        assert isinstance(last, InferFailed)
        assert last.engine_lost  # the gateway continues at another instance


async def test_idle_group_ends_with_a_stage_too(group: Group, directory: Path) -> None:
    await group.begin(directory, 2)
    await group.ready()
    os.kill(group.pids[1], signal.SIGKILL)
    report = await group.engines.reported(group.starts[0].instance_id, lambda r: r.state == "failed")
    assert report.error is not None
    assert "so the group ends" in report.error.message


async def test_drained_group_stops_without_a_failure(group: Group, directory: Path) -> None:
    await group.begin(directory, 2)
    first = await group.ready()
    stream = await group.engines.ask(first, "completion", prompt="a", max_tokens=200, temperature=0, ignore_eos=True)
    await until_streaming(stream)
    # The later stage waits for the first one, which answers what it has begun.
    for start in reversed(group.starts):
        await group.engines.mesh.request(subjects.engine_control(start.instance_id), DrainEngine(), Done)
    await stream.last()
    assert len(stream.tokens()) == 200
    for start in group.starts:
        await group.engines.reported(start.instance_id, lambda r: r.state == "stopped")
    assert "failed" not in group.states()


async def test_group_refuses_what_it_cannot_do(group: Group, directory: Path) -> None:
    await group.begin(directory, 2)
    first = await group.ready()
    embedded = await (await group.engines.ask(first, "embedding", input="a")).last()
    assert isinstance(embedded, InferFailed)
    assert "stages" in embedded.error.message
    later = await (await group.engines.ask(group.starts[1].instance_id, "completion", prompt="a")).last()
    assert isinstance(later, InferFailed)
    assert "first stage" in later.error.message
