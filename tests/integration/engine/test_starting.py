"""Engine processes at start: waiting, refused models, and early exits."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.numpy import load_file, save_file

from shared.contracts import subjects
from shared.contracts.base import Done
from shared.contracts.engine import DrainEngine
from shared.contracts.loader import AttachWeights, WeightsAttached
from shared.contracts.phases import Phase
from shared.errors import CheckpointInvalid
from shared.messaging import Mesh
from tests.integration.engine.processes import exited, forked
from tests.support.engines import Engines, ZygoteClient
from tests.support.segments import FakeLoader, card_of


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
        (lambda d: with_config(d, quantization_config={"quant_method": "gptq"}), "unsupported_architecture", "Quantised"),
    ],
)
async def test_an_unusable_model_is_reported_and_the_process_exits(
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


async def test_failed_load_keeps_its_error_class(engines: Engines, mesh: Mesh, client: ZygoteClient, demo_directory: Path) -> None:
    loader = FakeLoader(mesh, engines.node, error=CheckpointInvalid("model.safetensors is truncated"))
    await loader.start()
    start = engines.spec(card_of(demo_directory))
    pid = await forked(client, start)
    report = await engines.settled(start.instance_id)
    assert report.error is not None
    assert (report.error.code, report.error.message) == ("checkpoint_invalid", "model.safetensors is truncated")
    assert await exited(client, pid) == 1
    loader.close()


async def test_kv_cache_too_small_for_a_block_is_refused(
    engines: Engines, loader: FakeLoader, client: ZygoteClient, demo_directory: Path
) -> None:
    start = engines.spec(card_of(demo_directory), kv_bytes=1000)
    pid = await forked(client, start)
    report = await engines.settled(start.instance_id)
    assert report.error is not None
    assert report.error.code == "insufficient_memory"
    assert await exited(client, pid) == 1


async def test_binding_continues_while_bytes_arrive(
    engines: Engines, mesh: Mesh, client: ZygoteClient, demo_directory: Path
) -> None:
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


async def test_engine_follows_a_restarted_loader(engines: Engines, mesh: Mesh, client: ZygoteClient, demo_directory: Path) -> None:
    """An engine follows a restarted loader.

    The engine starts before the loader, and has mapped a segment that is replaced before it is
    complete.
    """
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


async def test_attach_request_lost_by_the_loader_is_repeated(
    engines: Engines, mesh: Mesh, client: ZygoteClient, demo_directory: Path
) -> None:
    """The engine repeats a request for weights that the loader lost.

    The loader, or NATS, may be killed between request and reply; the engine gets no notice of that.
    """

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
    assert list(dict.fromkeys(loader.asked)) == ["index", "complete"]
    assert min(Counter(loader.asked).values()) >= 2
    os.kill(pid, signal.SIGTERM)
    assert await exited(client, pid) == 0
    loader.close()


async def test_engine_starts_without_a_zygote(engines: Engines, loader: FakeLoader, demo_directory: Path) -> None:
    start = engines.spec(card_of(demo_directory))
    process = engines.spawn(start)
    report = await engines.settled(start.instance_id)
    assert (report.state, report.pid) == ("ready", process.pid)
    assert (await engines.answer(start.instance_id, "completion", prompt="a", max_tokens=3)).finish() == "length"
    await engines.mesh.request(subjects.engine_control(start.instance_id), DrainEngine(), Done)
    assert await asyncio.to_thread(process.wait, 60) == 0


async def test_sigterm_during_the_load_ends_the_engine(
    engines: Engines, mesh: Mesh, client: ZygoteClient, demo_directory: Path
) -> None:
    loader = FakeLoader(mesh, engines.node, hold=True)
    await loader.start()
    start = engines.spec(card_of(demo_directory))
    pid = await forked(client, start)
    await engines.reported(start.instance_id, lambda r: r.phase is Phase.LOAD)
    os.kill(pid, signal.SIGTERM)
    assert await exited(client, pid) == 0
    loader.close()
