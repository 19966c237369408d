"""Groups of stage processes answer as one engine does, and end as a whole."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from shared.contracts import subjects
from shared.contracts.base import Done
from shared.contracts.engine import DrainEngine, EngineReport, PingEngine
from shared.contracts.inference import CancelInfer, Endpoint, InferChunk, InferFailed
from tests.integration.engine.processes import SLOW, exited, forked, until_streaming
from tests.integration.engine.stage_processes import LAYERS, Group
from tests.support.engines import Engines, Stream
from tests.support.paced_zygote import Pace
from tests.support.segments import card_of


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from thaw.demo.models import Shape, make_demo_model

    shape = Shape(1024, 64, 160, LAYERS, 4, 2, 1024, "float32", 0.0)
    return make_demo_model(tmp_path_factory.mktemp("staged") / "model", shape)


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
