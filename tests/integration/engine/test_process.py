"""Engine processes over real NATS: start, respond, drain, and exit."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from shared.contracts import subjects
from shared.contracts.base import Done
from shared.contracts.engine import DrainEngine, EngineReport, PingEngine
from shared.contracts.inference import CancelInfer, EmbeddingsFinished, InferChunk, InferFailed, InferFinished, InferStarted
from shared.contracts.phases import Phase
from shared.errors import InstanceBusy, Unreachable
from tests.integration.engine.processes import FINITE, SLOW, exited, forked, until_streaming
from tests.support.engines import Engines, ZygoteClient
from tests.support.paced_zygote import Pace
from tests.support.segments import FakeLoader, card_of


async def test_start_is_reported_with_its_phases(engines: Engines, instance: tuple[str, int], loader: FakeLoader) -> None:
    name, pid = instance
    report = await engines.mesh.request(subjects.engine_control(name), PingEngine(), EngineReport)
    assert (report.pid, report.state, report.progress) == (pid, "ready", 1.0)
    assert {s.phase for s in report.phases} >= {Phase.LIBRARIES, Phase.INIT, Phase.LOAD, Phase.PROFILE}
    assert next(s for s in report.phases if s.phase is Phase.PROFILE).detail == {"copied_parameters": 0, "packed": 1}
    assert all(s.start_ms <= 0 for s in report.phases)
    assert list(dict.fromkeys(loader.asked)) == ["index", "complete"]


async def test_response_is_streamed_in_numbered_messages(engines: Engines, instance: tuple[str, int]) -> None:
    stream = await engines.answer(
        instance[0],
        "chat",
        messages=[{"role": "user", "content": "Hello"}],
        max_tokens=12,
        temperature=0,
        logprobs=True,
        top_logprobs=2,
        return_token_ids=True,
        frobnicate=1,
    )
    first, *chunks, last = stream.replies
    assert [r.seq for r in stream.replies] == list(range(len(stream.replies)))
    assert isinstance(first, InferStarted)
    assert first.ignored == ("frobnicate",)
    assert first.prompt_token_ids is not None
    assert len(first.prompt_token_ids) == first.prompt_tokens
    assert [s.phase for s in first.phases] == [Phase.QUEUE]
    assert isinstance(last, InferFinished)
    assert last.usage.completion_tokens == len(stream.tokens()) == 12
    costs = [chunk.device_s for chunk in chunks if isinstance(chunk, InferChunk)] + [last.usage.device_s]
    assert costs == sorted(costs)
    assert 0 < costs[0] < costs[-1]
    assert stream.finish() == "length"
    assert isinstance(chunks[0], InferChunk)
    assert [s.phase for s in chunks[0].phases] == [Phase.PREFILL]
    for chunk in chunks:
        assert isinstance(chunk, InferChunk)
        for delta in chunk.choices:
            assert delta.logprobs is not None
            (status,) = delta.logprobs
            assert status.token_id == delta.token_ids[0] == status.top[0].token_id
            assert len(status.top) == 2
            assert status.logprob <= 0


async def test_concurrent_requests_give_the_same_output_as_alone(engines: Engines, instance: tuple[str, int]) -> None:
    def body(i: int) -> dict[str, object]:
        return {"prompt": f"Number {i} says", "max_tokens": 20 + i, "temperature": 0}

    alone = [(await engines.answer(instance[0], "completion", **body(i))).text() for i in range(6)]
    together = await asyncio.gather(*(engines.answer(instance[0], "completion", **body(i)) for i in range(6)))
    assert [s.text() for s in together] == alone


async def test_choices_echo_and_stop_strings(engines: Engines, instance: tuple[str, int]) -> None:
    plain = await engines.answer(instance[0], "completion", prompt=["ab", "cd"], max_tokens=30, temperature=0)
    text = plain.text(1)
    stop = text[10:13]
    stopped = await engines.answer(
        instance[0], "completion", prompt=["ab", "cd"], max_tokens=30, temperature=0, stop=stop, echo=True
    )
    assert stopped.text(1) == "cd" + text[: text.index(stop)]
    assert stopped.finish(1) == "stop"


async def test_embeddings_of_a_generating_model(engines: Engines, instance: tuple[str, int]) -> None:
    stream = await engines.answer(instance[0], "embedding", input=["one", "two", "one"])
    done = stream.replies[-1]
    assert isinstance(done, EmbeddingsFinished)
    assert done.dimensions == 64
    assert done.vectors[0] == done.vectors[2] != done.vectors[1]


async def test_cancelled_request_ends_without_a_final_message(engines: Engines, instance: tuple[str, int], pace: Pace) -> None:
    with pace.slowed():
        stream = await engines.ask(instance[0], "completion", **SLOW)
        await until_streaming(stream)
        cancel = CancelInfer(request_id=stream.request_id)
        await engines.mesh.request(subjects.engine_control(instance[0]), cancel, Done)
        await engines.mesh.request(subjects.engine_control(instance[0]), cancel, Done)
    await engines.reported(instance[0], lambda r: r.load.active == 0 and r.load.generated_tokens > 0)
    await engines.answer(instance[0], "completion", prompt="x", max_tokens=2)
    assert isinstance(stream.replies[-1], InferChunk)
    assert len(stream.tokens()) < 900


async def test_request_over_its_deadline_fails(engines: Engines, instance: tuple[str, int]) -> None:
    stream = await engines.ask(instance[0], "completion", deadline_ms=150, **SLOW)
    last = await stream.last()
    assert isinstance(last, InferFailed)
    assert last.error.code == "deadline_exceeded"


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ({"prompt": "a", "suffix": "b"}, "unsupported_parameter"),
        ({"prompt": "a", "max_tokens": 5000}, "context_length_exceeded"),
        ({"prompt": "word " * 8000}, "context_length_exceeded"),
        ({"prompt": "a", "temperature": -1}, "invalid_request"),
        ({}, "invalid_request"),
    ],
)
async def test_invalid_request_fails_immediately(
    engines: Engines, instance: tuple[str, int], body: dict[str, object], code: str
) -> None:
    stream = await engines.answer(instance[0], "completion", **body)
    (only,) = stream.replies
    assert isinstance(only, InferFailed)
    assert (only.seq, only.error.code) == (0, code)


async def test_draining_engine_finishes_running_requests_and_refuses_others(
    engines: Engines, instance: tuple[str, int], client: ZygoteClient, pace: Pace
) -> None:
    name, pid = instance
    with pace.slowed():
        running = await engines.ask(name, "completion", **FINITE)
        await until_streaming(running)
        pace.hold()
        with pytest.raises(InstanceBusy):
            await engines.mesh.request(subjects.engine_control(name), DrainEngine(only_if_idle=True), Done)
        await engines.mesh.request(subjects.engine_control(name), DrainEngine(), Done)
        refused = await engines.answer(name, "completion", prompt="x", max_tokens=1)
    (only,) = refused.replies
    assert isinstance(only, InferFailed)
    assert (only.seq, only.error.code) == (0, "instance_draining")
    assert isinstance(await running.last(), InferFinished)
    assert len(running.tokens()) == FINITE["max_tokens"]
    assert await exited(client, pid) == 0
    await engines.reported(name, lambda r: r.state == "stopped")
    with pytest.raises(Unreachable):
        await engines.mesh.request(subjects.engine_control(name), PingEngine(), EngineReport)


async def test_idle_engine_exits_on_a_conditional_drain(engines: Engines, instance: tuple[str, int], client: ZygoteClient) -> None:
    await engines.mesh.request(subjects.engine_control(instance[0]), DrainEngine(only_if_idle=True), Done)
    assert await exited(client, instance[1]) == 0


async def test_sigterm_ends_running_requests_with_an_error(
    engines: Engines, instance: tuple[str, int], client: ZygoteClient, pace: Pace
) -> None:
    with pace.slowed():
        stream = await engines.ask(instance[0], "completion", **SLOW)
        await until_streaming(stream)
        os.kill(instance[1], signal.SIGTERM)
        await stream.last()
    last = await stream.last()
    assert isinstance(last, InferFailed)
    assert last.error.code == "shutting_down"
    assert await exited(client, instance[1]) == 0


async def test_the_kv_cache_is_shared_by_waiting(
    engines: Engines, loader: FakeLoader, client: ZygoteClient, demo_directory: Path
) -> None:
    """Requests wait for KV cache; a request that can never fit is refused.

    The cache holds 256 tokens.
    """
    per_token = 2 * 2 * 2 * 16 * 4
    start = engines.spec(card_of(demo_directory), kv_bytes=256 * per_token)
    pid = await forked(client, start)
    assert (await engines.settled(start.instance_id)).state == "ready"
    body = {"prompt": list(range(10, 110)), "max_tokens": 100, "temperature": 0, "ignore_eos": True}
    streams = await asyncio.gather(*(engines.answer(start.instance_id, "completion", **body) for _ in range(4)))
    assert [len(s.tokens()) for s in streams] == [100] * 4
    assert len({s.text() for s in streams}) == 1
    never = await engines.answer(start.instance_id, "completion", **{**body, "max_tokens": 200})
    assert isinstance(never.replies[-1], InferFailed)
    assert never.replies[-1].error.code == "context_length_exceeded"
    os.kill(pid, signal.SIGTERM)
    assert await exited(client, pid) == 0
