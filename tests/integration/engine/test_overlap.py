"""Engine processes that compute while their weights arrive (Torpor, section 4.3)."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf

from shared.contracts.engine import EngineStart
from shared.contracts.inference import InferFailed, InferFinished
from shared.errors import CheckpointInvalid
from shared.messaging import Mesh
from tests.integration.engine.processes import exited, forked
from tests.support.engines import Engines, Stream, ZygoteClient
from tests.support.followed_loader import FollowedLoader
from tests.support.segments import FakeLoader, card_of

ASK: dict[str, Any] = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}
PROMPTS = ["the quick brown fox", "a b c"]
PAGES = 256 << 20


@pytest.fixture(scope="module")
def model(demo_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose layers have several units each."""
    torch.manual_seed(0)
    directory = tmp_path_factory.mktemp("overlap") / "m"
    config = tf.AutoConfig.from_pretrained(demo_directory)
    config.hidden_size, config.intermediate_size, config.num_hidden_layers = 256, 1024, 4
    config.num_attention_heads = config.num_key_value_heads = 4
    config.head_dim, config.initializer_range = 64, 0.3
    tf.AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(directory)
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(demo_directory / file, directory / file)
    return directory


@pytest.fixture
def home() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="thaw-o-") as directory:  # a socket path must be short
        yield Path(directory)


@pytest.fixture(params=["unified", "separate", "gpu"])
async def followed(
    request: pytest.FixtureRequest, mesh: Mesh, engines: Engines, home: Path, model: Path
) -> AsyncIterator[FollowedLoader]:
    on_gpu = request.param == "gpu"
    loader = FollowedLoader(mesh, engines.node, home, model, pages=0 if request.param == "unified" else PAGES, on_gpu=on_gpu)
    await loader.start()
    yield loader
    await loader.stop()


@pytest.fixture(scope="module")
def expected() -> dict[str, list[int]]:
    """Tokens of an engine that waits for its weights, by prompt; filled by the first test."""
    return {}


def started(engines: Engines, home: Path, model: Path, followed: FollowedLoader, **environment: Any) -> EngineStart:
    spec = engines.spec(card_of(model), THAW_HOME=str(home), **environment)
    if followed.device is None:
        return spec
    device = followed.device.device_id
    return spec.model_copy(update={"device": device, "separate_memory": device.startswith("cpu")})


class Engine:
    """A process of the engine: forked, or for a GPU a new one with the stand-in driver."""

    def __init__(self, client: ZygoteClient, pid: int, process: subprocess.Popen[bytes] | None = None) -> None:
        self._client, self.pid, self._process = client, pid, process

    @classmethod
    async def start(cls, engines: Engines, client: ZygoteClient, start: EngineStart) -> Engine:
        if start.device.startswith("cuda"):
            process = engines.spawn(start, "tests.support.engine_without_gpu")
            return cls(client, process.pid, process)
        return cls(client, await forked(client, start))

    async def exited(self) -> int:
        """Return the exit status, when the process has ended."""
        if self._process is not None:
            return await asyncio.to_thread(self._process.wait, 60)
        return await exited(self._client, self.pid)

    async def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        await self.exited()


async def asked_while_loading(engines: Engines, client: ZygoteClient, start: EngineStart) -> tuple[Engine, Stream]:
    """Start an engine, and ask for the first prompt as soon as it accepts requests."""
    engine = await Engine.start(engines, client, start)
    await engines.reported(start.instance_id, lambda r: r.accepts_requests)
    return engine, await engines.ask(start.instance_id, "completion", prompt=PROMPTS[0], **ASK)


async def reference(mesh: Mesh, engines: Engines, client: ZygoteClient, home: Path, model: Path) -> dict[str, list[int]]:
    loader = FakeLoader(mesh, engines.node)
    await loader.start()
    start = engines.spec(card_of(model), THAW_HOME=str(home))
    pid = await forked(client, start)
    assert (await engines.settled(start.instance_id)).state == "ready"
    found = {}
    for prompt in PROMPTS:
        stream = await engines.ask(start.instance_id, "completion", prompt=prompt, **ASK)
        assert isinstance(await stream.last(), InferFinished)
        found[prompt] = stream.tokens()
    os.kill(pid, signal.SIGKILL)
    await exited(client, pid)
    loader.close()
    return found


@pytest.fixture
async def tokens(
    mesh: Mesh, nats_server: object, client: ZygoteClient, home: Path, model: Path, tmp_path: Path, expected: dict[str, list[int]]
) -> dict[str, list[int]]:
    if not expected:
        engines = Engines(mesh, "n-reference", nats_server.url, tmp_path)  # type: ignore[attr-defined]
        await engines.start()
        expected.update(await reference(mesh, engines, client, home, model))
    return expected


async def test_requests_join_a_load_and_get_the_tokens_of_an_engine_that_waits(
    engines: Engines, client: ZygoteClient, home: Path, model: Path, followed: FollowedLoader, tokens: dict[str, list[int]]
) -> None:
    start = started(engines, home, model, followed)
    engine = await Engine.start(engines, client, start)
    report = await engines.reported(start.instance_id, lambda r: r.accepts_requests or r.state != "loading")
    assert report.state == "loading", report.error
    streams = [await engines.ask(start.instance_id, "completion", prompt=PROMPTS[0], **ASK)]
    await followed.send(0.5)
    streams.append(await engines.ask(start.instance_id, "completion", prompt=PROMPTS[1], **ASK))
    await engines.reported(start.instance_id, lambda r: r.load.waiting + r.load.active == 2)
    assert not any(stream.replies for stream in streams)
    assert not engines.is_ready(start.instance_id)
    await followed.finish()
    for stream, prompt in zip(streams, PROMPTS, strict=True):
        assert isinstance(await stream.last(), InferFinished)
        assert stream.tokens() == tokens[prompt]
    report = await engines.settled(start.instance_id)
    assert (report.state, report.accepts_requests) == ("ready", False)
    again = await engines.ask(start.instance_id, "completion", prompt=PROMPTS[0], **ASK)
    assert isinstance(await again.last(), InferFinished)
    assert again.tokens() == tokens[PROMPTS[0]]
    if followed.device is None:
        await engine.kill()
        return
    device, booked = followed.device, start.kv_bytes
    await until(lambda: device.pages().lent_bytes == booked)
    assert [k.instance_id for k in device.pages().kv] == [start.instance_id]
    await engine.kill()
    await until(lambda: device.pages().lent_bytes == 0)
    assert device.audit() == []


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110  # the loader's threads notify no event loop
            await asyncio.sleep(0.01)


async def test_a_load_that_fails_midway_fails_its_requests_with_the_error(
    engines: Engines, client: ZygoteClient, home: Path, model: Path, followed: FollowedLoader
) -> None:
    start = started(engines, home, model, followed)
    engine = await Engine.start(engines, client, start)
    await engines.reported(start.instance_id, lambda r: r.accepts_requests)
    streams = [await engines.ask(start.instance_id, "completion", prompt=p, **ASK) for p in PROMPTS]
    await engines.reported(start.instance_id, lambda r: r.load.waiting + r.load.active == 2)
    await followed.send(0.5)
    await followed.fail(CheckpointInvalid("model.safetensors shrank while it was read"))
    for stream in streams:
        last = await stream.last()
        assert isinstance(last, InferFailed)
        assert (last.error.code, last.error.message, last.engine_lost) == (
            "checkpoint_invalid",
            "model.safetensors shrank while it was read",
            True,
        )
    report = await engines.settled(start.instance_id)
    assert report.error is not None
    assert (report.state, report.error.code) == ("failed", "checkpoint_invalid")
    assert await engine.exited() == 1
    if followed.device is not None:
        assert followed.arena is not None
        followed.arena.release()
        async with asyncio.timeout(60):
            while True:  # until the engine's connection has ended
                if not followed.device.pages().lent_bytes:
                    break
                await asyncio.sleep(0.01)
        assert followed.device.pages().mapped_bytes == 0
        assert followed.device.audit() == []


@pytest.mark.parametrize("followed", ["unified", "separate"], indirect=True)
async def test_a_lost_connection_costs_the_overlap_and_nothing_else(
    engines: Engines, client: ZygoteClient, home: Path, model: Path, followed: FollowedLoader, tokens: dict[str, list[int]]
) -> None:
    """Also that of a killed loader: the next one brings the weights again, into other pages."""
    start = started(engines, home, model, followed)
    engine, stream = await asked_while_loading(engines, client, start)
    await followed.send(0.5)
    await followed.restart()
    await followed.finish()
    assert isinstance(await stream.last(), InferFinished)
    assert stream.tokens() == tokens[PROMPTS[0]]
    await engine.kill()


@pytest.mark.parametrize("followed", ["gpu"], indirect=True)
async def test_units_of_a_gpu_that_a_lost_connection_has_not_sent_are_mapped_at_the_end(
    engines: Engines, client: ZygoteClient, home: Path, model: Path, followed: FollowedLoader, tokens: dict[str, list[int]]
) -> None:
    start = started(engines, home, model, followed)
    engine, stream = await asked_while_loading(engines, client, start)
    await followed.send(0.5)
    followed.disconnect()
    await followed.finish()
    assert isinstance(await stream.last(), InferFinished)
    assert stream.tokens() == tokens[PROMPTS[0]]
    assert followed.arena is not None
    assert followed.descriptors >= len(followed.arena.units), "all of them, once more"
    await engine.kill()


@pytest.mark.parametrize("followed", ["gpu"], indirect=True)
async def test_an_engine_fails_if_the_loader_of_its_gpu_memory_is_restarted_during_the_load(
    engines: Engines, client: ZygoteClient, home: Path, model: Path, followed: FollowedLoader
) -> None:
    start = started(engines, home, model, followed)
    engine, stream = await asked_while_loading(engines, client, start)
    await followed.send(0.5)
    await followed.restart()
    await followed.finish()
    assert isinstance(await stream.last(), InferFailed)
    report = await engines.settled(start.instance_id)
    assert report.error is not None
    assert "loader" in report.error.message
    assert await engine.exited() == 1


async def test_an_engine_that_is_stopped_while_it_waits_for_weights_exits(
    engines: Engines, client: ZygoteClient, home: Path, model: Path, followed: FollowedLoader
) -> None:
    start = started(engines, home, model, followed)
    engine, stream = await asked_while_loading(engines, client, start)
    await engines.reported(start.instance_id, lambda r: r.load.waiting + r.load.active == 1)
    os.kill(engine.pid, signal.SIGTERM)
    last = await stream.last()
    assert isinstance(last, InferFailed)
    assert last.engine_lost
    assert await engine.exited() == 0


async def test_with_overlap_off_requests_wait_for_the_whole_load(
    engines: Engines, client: ZygoteClient, home: Path, model: Path, followed: FollowedLoader
) -> None:
    start = started(engines, home, model, followed, THAW_ENGINE_OVERLAP="false")
    engine = await Engine.start(engines, client, start)
    await followed.send(0.5)
    await followed.finish()
    report = await engines.settled(start.instance_id)
    assert report.state == "ready", report.error
    assert not any(r.accepts_requests for r in engines.reports[start.instance_id])
    await engine.kill()
