"""LoRA adapters in an engine process over real NATS.

They are loaded while it serves, shared, refused, and unloaded.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from shared.contracts import subjects
from shared.contracts.base import Done
from shared.contracts.engine import DropAdapter, EngineReport, LoadAdapter, PingEngine
from shared.contracts.inference import InferFailed, InferFinished
from shared.contracts.loader import adapter_holder
from shared.contracts.models import ModelCard
from shared.messaging import Mesh
from tests.support.adapters import adapter_card, write_adapter
from tests.support.engines import Engines, Stream, ZygoteProcess
from tests.support.segments import FakeLoader, card_of

ASKED: dict[str, Any] = {"prompt": "Once upon", "max_tokens": 12, "temperature": 0}


@pytest.fixture
async def instance(engines: Engines, loader: FakeLoader, zygote: ZygoteProcess, demo_directory: Path) -> AsyncIterator[str]:
    """Yield a ready engine of the demo model with room for two adapters (60 KB)."""
    client = await zygote.connect()
    start = engines.spec(card_of(demo_directory, engine_args={"adapter_cache_bytes": 60_000}))
    client.send(start.model_dump_json().encode())
    assert (await engines.settled(start.instance_id)).state == "ready"
    yield start.instance_id
    await client.close()


@pytest.fixture
def cards(tmp_path: Path, demo_directory: Path) -> list[ModelCard]:
    return [adapter_card(write_adapter(tmp_path / n, demo_directory, seed=i, strength=0.5), n) for i, n in enumerate("abc")]


async def answer(engines: Engines, instance: str, adapter: ModelCard | None) -> str:
    stream = await engines.answer(instance, "completion", adapter=adapter, **ASKED)
    assert isinstance(stream.replies[-1], InferFinished), stream.replies[-1]
    return stream.text()


async def test_adapters_are_loaded_once_shared_and_evicted(
    engines: Engines, loader: FakeLoader, instance: str, cards: list[ModelCard]
) -> None:
    assert 20_000 < cards[0].info.weights_bytes < 30_000
    alone = [await answer(engines, instance, card) for card in (None, *cards)]
    assert len(set(alone)) == 4
    assert await asyncio.wait_for(loader.released.get(), 60) == adapter_holder(instance, 1)
    together = await asyncio.gather(*(answer(engines, instance, card) for card in (None, *cards, *cards)))
    assert together == [*alone, *alone[1:]]
    report = await engines.mesh.request(subjects.engine_control(instance), PingEngine(), EngineReport)
    assert len(report.load.adapters) == 2
    assert {a.active for a in report.load.adapters} == {0}


async def test_a_dropped_adapter_is_released(engines: Engines, loader: FakeLoader, instance: str, cards: list[ModelCard]) -> None:
    await answer(engines, instance, cards[0])
    await engines.mesh.request(subjects.engine_control(instance), DropAdapter(name="a"), Done)
    assert await asyncio.wait_for(loader.released.get(), 60) == adapter_holder(instance, 1)
    assert await answer(engines, instance, cards[0])
    assert loader.holders[-1] == adapter_holder(instance, 2)


async def failure(engines: Engines, instance: str, adapter: ModelCard) -> InferFailed:
    stream: Stream = await engines.answer(instance, "completion", adapter=adapter, **ASKED)
    last = stream.replies[-1]
    assert isinstance(last, InferFailed)
    return last


async def test_an_unusable_adapter_is_a_typed_error_and_the_engine_continues(
    engines: Engines, loader: FakeLoader, instance: str, cards: list[ModelCard], tmp_path: Path, demo_directory: Path
) -> None:
    wide = {"model.layers.0.self_attn.q_proj": (64, 32)}
    misfit = adapter_card(write_adapter(tmp_path / "w", demo_directory, modules=wide, targets=["q_proj"]), "w")
    failed = await failure(engines, instance, misfit)
    assert failed.error.code == "checkpoint_invalid"
    assert "does not fit model.layers.0.self_attn.q_proj" in failed.error.message
    assert await asyncio.wait_for(loader.released.get(), 60) == adapter_holder(instance, 1)
    large = adapter_card(write_adapter(tmp_path / "l", demo_directory, rank=64), "l")
    failed = await failure(engines, instance, large)
    assert failed.error.code == "insufficient_memory"
    assert "engine_args.adapter_cache_bytes of demo" in failed.error.message
    embedding = await engines.answer(instance, "embedding", adapter=cards[0], input="x")
    assert isinstance(embedding.replies[-1], InferFailed)
    assert embedding.replies[-1].error.code == "invalid_request"
    assert await answer(engines, instance, None)


async def test_cancelled_request_leaves_no_adapter_load(
    engines: Engines, mesh: Mesh, zygote: ZygoteProcess, demo_directory: Path, cards: list[ModelCard]
) -> None:
    loader = FakeLoader(mesh, engines.node, hold=True)
    await loader.start()
    client = await zygote.connect()
    start = engines.spec(card_of(demo_directory))
    client.send(start.model_dump_json().encode())
    loader.release_data()
    assert (await engines.settled(start.instance_id)).state == "ready"
    loader.hold_data()
    try:
        stream = await engines.ask(start.instance_id, "completion", deadline_ms=3_000, adapter=cards[0], **ASKED)
        last = await stream.last()
        assert last.error.code == "deadline_exceeded"
        loader.release_data()
        assert await answer(engines, start.instance_id, cards[0])
        assert set(loader.holders) == {start.instance_id, adapter_holder(start.instance_id, 1)}
    finally:
        loader.close()
        await client.close()


@pytest.fixture
async def starting(
    engines: Engines, mesh: Mesh, zygote: ZygoteProcess, demo_directory: Path
) -> AsyncIterator[tuple[FakeLoader, str]]:
    """Yield an engine that waits for its weights."""
    loader = FakeLoader(mesh, engines.node, hold=True)
    await loader.start()
    client = await zygote.connect()
    start = engines.spec(card_of(demo_directory, engine_args={"adapter_cache_bytes": 60_000}))
    client.send(start.model_dump_json().encode())
    await engines.reported(start.instance_id, lambda r: r.state == "loading")
    yield loader, start.instance_id
    loader.close()
    await client.close()


async def notify(engines: Engines, instance: str, *cards: ModelCard) -> None:
    for card in cards:
        await engines.mesh.request(subjects.engine_control(instance), LoadAdapter(card=card), Done)


async def test_adapters_load_concurrently_with_their_base(
    engines: Engines, starting: tuple[FakeLoader, str], cards: list[ModelCard]
) -> None:
    loader, instance = starting
    await notify(engines, instance, cards[0], cards[0], cards[1])
    early = {adapter_holder(instance, 0), adapter_holder(instance, -1)}
    await asyncio.wait_for(loader.held(early), 60)
    assert not engines.is_ready(instance), "the base's bytes are not loaded"
    loader.release_data()
    assert (await engines.settled(instance)).state == "ready"
    attached = await engines.reported(instance, lambda r: len(r.load.adapters) == 2)
    assert {a.name for a in attached.load.adapters} == {"a", "b"}, "attached without a request"
    assert {await asyncio.wait_for(loader.released.get(), 60) for _ in early} == early
    assert len({await answer(engines, instance, card) for card in (None, *cards[:2])}) == 3
    assert set(loader.holders) == {instance, *early, adapter_holder(instance, 1), adapter_holder(instance, 2)}


async def test_failed_adapter_prefetch_is_retried_by_the_request(
    engines: Engines, starting: tuple[FakeLoader, str], cards: list[ModelCard], tmp_path: Path, demo_directory: Path
) -> None:
    loader, instance = starting
    large = adapter_card(write_adapter(tmp_path / "l", demo_directory, rank=64), "l")
    await notify(engines, instance, cards[0], large)
    await asyncio.wait_for(loader.held({adapter_holder(instance, -1)}), 60)
    await engines.mesh.request(subjects.engine_control(instance), DropAdapter(name="a"), Done)
    assert await asyncio.wait_for(loader.released.get(), 60) == adapter_holder(instance, 0)
    loader.release_data()
    assert (await engines.settled(instance)).state == "ready"
    assert await asyncio.wait_for(loader.released.get(), 60) == adapter_holder(instance, -1), "larger than the room"
    assert (await failure(engines, instance, large)).error.code == "insufficient_memory"
    assert await answer(engines, instance, cards[0])


async def test_a_ready_engine_attaches_announced_adapters(
    engines: Engines, loader: FakeLoader, instance: str, cards: list[ModelCard]
) -> None:
    await notify(engines, instance, cards[2])
    attached = await engines.reported(instance, lambda r: bool(r.load.adapters))
    assert [a.name for a in attached.load.adapters] == ["c"]
