"""Engine processes over real NATS: start, answer, drain, fail, and leave."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file, save_file

from shared.contracts import subjects
from shared.contracts.base import Done
from shared.contracts.engine import DrainEngine, EngineExited, EngineForked, EngineReport, EngineStart, PingEngine
from shared.contracts.inference import (
    CancelInfer,
    EmbeddingsFinished,
    InferChunk,
    InferFailed,
    InferFinished,
    InferStarted,
)
from shared.contracts.loader import AttachWeights, WeightsAttached
from shared.contracts.phases import Phase
from shared.errors import CheckpointInvalid, InstanceBusy, Unreachable
from shared.messaging import Mesh
from tests.support.engines import Engines, Stream, ZygoteClient, ZygoteProcess
from tests.support.segments import FakeLoader, card_of

SLOW: dict[str, Any] = {"prompt": "abc", "max_tokens": 900, "temperature": 0, "ignore_eos": True}
"""Takes about a second: long enough to be found running."""


@pytest.fixture
async def loader(mesh: Mesh, engines: Engines) -> AsyncIterator[FakeLoader]:
    loader = FakeLoader(mesh, engines.node)
    await loader.start()
    yield loader
    loader.close()


@pytest.fixture
async def client(zygote: ZygoteProcess) -> AsyncIterator[ZygoteClient]:
    client = await zygote.connect()
    yield client
    await client.close()


async def forked(client: ZygoteClient, start: EngineStart) -> int:
    client.send(start.model_dump_json().encode())
    told = await client.hear()
    assert isinstance(told, EngineForked), told
    assert told.instance_id == start.instance_id
    return told.pid


async def exited(client: ZygoteClient, pid: int) -> int:
    while True:
        told = await client.hear()
        if isinstance(told, EngineExited) and told.pid == pid:
            return told.returncode


@pytest.fixture
async def instance(
    engines: Engines, loader: FakeLoader, client: ZygoteClient, demo_directory: Path
) -> AsyncIterator[tuple[str, int]]:
    """A ready engine of the demo model, and its pid."""
    start = engines.spec(card_of(demo_directory))
    pid = await forked(client, start)
    report = await engines.settled(start.instance_id)
    assert report.state == "ready", report.error
    yield start.instance_id, pid
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    await exited(client, pid)


async def test_a_start_is_told_with_its_phases(engines: Engines, instance: tuple[str, int], loader: FakeLoader) -> None:
    name, pid = instance
    report = await engines.mesh.request(subjects.engine_control(name), PingEngine(), EngineReport)
    assert (report.pid, report.state, report.progress) == (pid, "ready", 1.0)
    assert {s.phase for s in report.phases} >= {Phase.LIBRARIES, Phase.INIT, Phase.LOAD, Phase.PROFILE}
    assert next(s for s in report.phases if s.phase is Phase.PROFILE).detail == {"copied_parameters": 0, "packed": 1}
    assert all(s.start_ms <= 0 for s in report.phases)
    assert loader.asked == ["index", "complete"]


async def test_an_answer_streams_numbered_and_whole(engines: Engines, instance: tuple[str, int]) -> None:
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
    assert stream.finish() == "length"
    assert isinstance(chunks[0], InferChunk)
    assert [s.phase for s in chunks[0].phases] == [Phase.PREFILL]
    for chunk in chunks:
        assert isinstance(chunk, InferChunk)
        for delta in chunk.choices:
            assert delta.logprobs is not None
            (told,) = delta.logprobs
            assert told.token_id == delta.token_ids[0] == told.top[0].token_id
            assert len(told.top) == 2
            assert told.logprob <= 0


async def test_many_at_once_are_each_what_they_are_alone(engines: Engines, instance: tuple[str, int]) -> None:
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


async def until_streaming(stream: Stream) -> None:
    await stream.until(lambda r: any(isinstance(m, InferChunk) for m in r))


async def test_a_cancelled_request_ends_without_a_last_message(engines: Engines, instance: tuple[str, int]) -> None:
    stream = await engines.ask(instance[0], "completion", **SLOW)
    await until_streaming(stream)
    cancel = CancelInfer(request_id=stream.request_id)
    await engines.mesh.request(subjects.engine_control(instance[0]), cancel, Done)
    await engines.mesh.request(subjects.engine_control(instance[0]), cancel, Done)
    await engines.reported(instance[0], lambda r: r.load.active == 0 and r.load.generated_tokens > 0)
    await engines.answer(instance[0], "completion", prompt="x", max_tokens=2)
    assert isinstance(stream.replies[-1], InferChunk)
    assert len(stream.tokens()) < 900


async def test_a_request_over_its_deadline_is_ended(engines: Engines, instance: tuple[str, int]) -> None:
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
async def test_bad_requests_fail_at_once(engines: Engines, instance: tuple[str, int], body: dict[str, object], code: str) -> None:
    stream = await engines.answer(instance[0], "completion", **body)
    (only,) = stream.replies
    assert isinstance(only, InferFailed)
    assert (only.seq, only.error.code) == (0, code)


async def test_draining_answers_what_runs_and_refuses_the_rest(
    engines: Engines, instance: tuple[str, int], client: ZygoteClient
) -> None:
    name, pid = instance
    running = await engines.ask(name, "completion", **SLOW)
    await until_streaming(running)
    with pytest.raises(InstanceBusy):
        await engines.mesh.request(subjects.engine_control(name), DrainEngine(only_if_idle=True), Done)
    await engines.mesh.request(subjects.engine_control(name), DrainEngine(), Done)
    refused = await engines.answer(name, "completion", prompt="x", max_tokens=1)
    (only,) = refused.replies
    assert isinstance(only, InferFailed)
    assert (only.seq, only.error.code) == (0, "instance_draining")
    assert isinstance(await running.last(), InferFinished)
    assert len(running.tokens()) == 900
    assert await exited(client, pid) == 0
    await engines.reported(name, lambda r: r.state == "stopped")
    with pytest.raises(Unreachable):
        await engines.mesh.request(subjects.engine_control(name), PingEngine(), EngineReport)


async def test_an_idle_engine_leaves_if_idle(engines: Engines, instance: tuple[str, int], client: ZygoteClient) -> None:
    await engines.mesh.request(subjects.engine_control(instance[0]), DrainEngine(only_if_idle=True), Done)
    assert await exited(client, instance[1]) == 0


async def test_sigterm_ends_what_runs_with_an_error(engines: Engines, instance: tuple[str, int], client: ZygoteClient) -> None:
    stream = await engines.ask(instance[0], "completion", **SLOW)
    await until_streaming(stream)
    os.kill(instance[1], signal.SIGTERM)
    last = await stream.last()
    assert isinstance(last, InferFailed)
    assert last.error.code == "shutting_down"
    assert await exited(client, instance[1]) == 0


async def test_the_kv_cache_is_shared_by_waiting(
    engines: Engines, loader: FakeLoader, client: ZygoteClient, demo_directory: Path
) -> None:
    """A cache for 256 tokens: requests wait for each other, and one that could never fit is told so."""
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


# Starts that fail


def without_a_tensor(directory: Path) -> None:
    weights = load_file(directory / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, directory / "model.safetensors", {"format": "pt"})


def with_a_wrong_shape(directory: Path) -> None:
    weights = load_file(directory / "model.safetensors")
    weights["model.norm.weight"] = weights["model.norm.weight"][:32]
    save_file(weights, directory / "model.safetensors", {"format": "pt"})


def without_a_tokenizer(directory: Path) -> None:
    (directory / "tokenizer.json").unlink()


def with_a_damaged_tokenizer(directory: Path) -> None:
    (directory / "tokenizer.json").write_text((directory / "tokenizer.json").read_text()[:5000])


def with_config(directory: Path, **changes: object) -> None:
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | changes))


@pytest.mark.parametrize(
    ("spoil", "code", "named"),
    [
        (without_a_tensor, "checkpoint_invalid", "layers.1.mlp.up_proj"),
        (with_a_wrong_shape, "checkpoint_invalid", "model.norm.weight is [32] and must be [64]"),
        (without_a_tokenizer, "checkpoint_invalid", "tokenizer"),
        (with_a_damaged_tokenizer, "checkpoint_invalid", "tokenizer"),
        (lambda d: with_config(d, model_type="nonesuch"), "unsupported_architecture", "nonesuch"),
        (lambda d: with_config(d, model_type="vit"), "unsupported_architecture", "vit"),
        (lambda d: with_config(d, quantization_config={"quant_method": "gptq"}), "unsupported_architecture", "quantised"),
    ],
)
async def test_what_cannot_be_served_is_told_and_the_process_ends(
    engines: Engines,
    loader: FakeLoader,
    client: ZygoteClient,
    demo_directory: Path,
    tmp_path: Path,
    spoil: Callable[[Path], None],
    code: str,
    named: str,
) -> None:
    directory = tmp_path / "spoilt"
    shutil.copytree(demo_directory, directory)
    spoil(directory)
    start = engines.spec(card_of(directory))
    pid = await forked(client, start)
    report = await engines.settled(start.instance_id)
    assert report.error is not None
    assert (report.state, report.error.code) == ("failed", code)
    assert named in report.error.message
    assert await exited(client, pid) == 1


async def test_a_load_that_fails_keeps_its_class(engines: Engines, mesh: Mesh, client: ZygoteClient, demo_directory: Path) -> None:
    loader = FakeLoader(mesh, engines.node, error=CheckpointInvalid("model.safetensors is truncated"))
    await loader.start()
    start = engines.spec(card_of(demo_directory))
    pid = await forked(client, start)
    report = await engines.settled(start.instance_id)
    assert report.error is not None
    assert (report.error.code, report.error.message) == ("checkpoint_invalid", "model.safetensors is truncated")
    assert await exited(client, pid) == 1
    loader.close()


async def test_kv_bytes_that_hold_nothing(engines: Engines, loader: FakeLoader, client: ZygoteClient, demo_directory: Path) -> None:
    start = engines.spec(card_of(demo_directory), kv_bytes=1000)
    pid = await forked(client, start)
    report = await engines.settled(start.instance_id)
    assert report.error is not None
    assert report.error.code == "insufficient_memory"
    assert await exited(client, pid) == 1


async def test_binding_goes_on_while_bytes_arrive(engines: Engines, mesh: Mesh, client: ZygoteClient, demo_directory: Path) -> None:
    loader = FakeLoader(mesh, engines.node, hold=True)
    await loader.start()
    start = engines.spec(card_of(demo_directory))
    pid = await forked(client, start)
    bound = await engines.reported(start.instance_id, lambda r: r.phase is Phase.LOAD)
    assert Phase.INIT in {s.phase for s in bound.phases}
    assert bound.state == "loading"
    loader.release_data()
    assert (await engines.settled(start.instance_id)).state == "ready"
    with_data = await engines.answer(start.instance_id, "completion", prompt="abc", max_tokens=8, temperature=0)
    assert len(set(with_data.tokens())) > 1
    os.kill(pid, signal.SIGTERM)
    assert await exited(client, pid) == 0
    loader.close()


async def test_a_loader_that_was_restarted_is_followed(
    engines: Engines, mesh: Mesh, client: ZygoteClient, demo_directory: Path
) -> None:
    """The engine starts before there is a loader, and has mapped a segment that is replaced before it is complete."""
    start = engines.spec(card_of(demo_directory))
    pid = await forked(client, start)
    await engines.reported(start.instance_id, lambda r: r.state == "loading")
    loader = FakeLoader(mesh, engines.node, hold=True)
    await loader.start()
    await engines.reported(start.instance_id, lambda r: r.phase is Phase.LOAD)
    loader.replace()
    loader.release_data()
    assert (await engines.settled(start.instance_id)).state == "ready"
    stream = await engines.answer(start.instance_id, "completion", prompt="abc", max_tokens=8, temperature=0)
    assert len(set(stream.tokens())) > 1
    os.kill(pid, signal.SIGTERM)
    assert await exited(client, pid) == 0
    loader.close()


async def test_a_question_that_the_loader_lost_is_asked_again(
    engines: Engines, mesh: Mesh, client: ZygoteClient, demo_directory: Path
) -> None:
    """As when the loader, or NATS, is killed between the question and the answer: nothing tells the engine of that."""

    class Forgetful(FakeLoader):
        async def _attach(self, command: AttachWeights) -> WeightsAttached:
            if command.until not in self.asked:
                self.asked.append(command.until)
                await asyncio.Event().wait()
            return await super()._attach(command)

    loader = Forgetful(mesh, engines.node)
    await loader.start()
    start = engines.spec(card_of(demo_directory))
    pid = await forked(client, start)
    assert (await engines.settled(start.instance_id)).state == "ready"
    assert loader.asked == ["index", "index", "complete", "complete"]
    os.kill(pid, signal.SIGTERM)
    assert await exited(client, pid) == 0
    loader.close()


async def test_it_starts_without_a_zygote_too(engines: Engines, loader: FakeLoader, demo_directory: Path) -> None:
    start = engines.spec(card_of(demo_directory))
    process = engines.spawn(start)
    report = await engines.settled(start.instance_id)
    assert (report.state, report.pid) == ("ready", process.pid)
    assert (await engines.answer(start.instance_id, "completion", prompt="a", max_tokens=3)).finish() == "length"
    await engines.mesh.request(subjects.engine_control(start.instance_id), DrainEngine(), Done)
    assert await asyncio.to_thread(process.wait, 30) == 0


async def test_a_signal_while_loading_ends_it(engines: Engines, mesh: Mesh, client: ZygoteClient, demo_directory: Path) -> None:
    loader = FakeLoader(mesh, engines.node, hold=True)
    await loader.start()
    start = engines.spec(card_of(demo_directory))
    pid = await forked(client, start)
    await engines.reported(start.instance_id, lambda r: r.phase is Phase.LOAD)
    os.kill(pid, signal.SIGTERM)
    assert await exited(client, pid) == 0
    loader.close()
