"""Ollama's /api/pull, with the real `ollama` client, and a scheduler that the test plays."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from pydantic import SecretStr

from services.gateway.authorization import hash_key
from services.gateway.http.endpoints import ollama_pull
from shared.contracts import subjects
from shared.contracts.admin import (
    ADMIN_REQUEST,
    AdminRequest,
    ClusterView,
    ModelPulled,
    PullModel,
    PullOptions,
    PullView,
    ViewCluster,
)
from shared.contracts.base import Message
from shared.errors import CheckpointInvalid, Unavailable
from shared.messaging.streams import catalog_bucket
from tests.integration.gateway.conftest import CARDS, Served, ServeFn, until_listed
from tests.support.fake_engine import FakeNode, card_of

ollama = pytest.importorskip("ollama")
FAR = card_of("far", source="s3://b/far")
FAR = FAR.model_copy(update={"info": FAR.info.model_copy(update={"source": "s3://b/far", "revision": "r1"})})
VIEW = ClusterView(scheduler="s", epoch=1)


class Scheduler:
    """Answers a pull when the gateway has viewed its progress as often as there is progress."""

    def __init__(self, *loaded_bytes: int) -> None:
        self.progress = list(loaded_bytes)
        self.error: Exception | None = None
        self.pulls: list[PullModel] = []
        self._viewed = asyncio.Event()

    async def answer(self, request: AdminRequest) -> Message:
        if isinstance(request, ViewCluster):
            assert request.brief
            if not self.progress:
                self._viewed.set()
                raise Unavailable("no leader")
            loaded = self.progress.pop(0)
            found = PullView(model="far", node="n", tier="ssd", state="running", since=0.0, loaded_bytes=loaded, total_bytes=1000)
            return VIEW.model_copy(update={"pulls": (found.model_copy(update={"tier": "dram", "loaded_bytes": 9}), found)})
        assert isinstance(request, PullModel)
        self.pulls.append(request)
        if self.error is not None:
            raise self.error
        await self._viewed.wait()
        return ModelPulled(name="far", node="n", tier="ssd", tiers=("ssd",), nbytes=1000)


@pytest.fixture(autouse=True)
def short_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ollama_pull, "_INTERVAL_S", 0.01)


@asynccontextmanager
async def client_of(gateway: Served, node: FakeNode, scheduler: Scheduler, **fields: Any) -> AsyncIterator[Any]:
    """Yield a client of a gateway that knows the model `far`."""
    bucket = await catalog_bucket(node.mesh.nc.jetstream())
    await bucket.put(subjects.token(FAR.name), FAR.model_dump_json().encode())
    await node.mesh.respond(subjects.ADMIN, ADMIN_REQUEST, scheduler.answer, concurrent=True).start()
    await node.mesh.flush()
    if not fields:
        await until_listed(gateway, (*CARDS, FAR))
    client = ollama.AsyncClient(host=gateway.base, timeout=60, **fields)
    try:
        yield client
    finally:
        await client._client.aclose()


async def test_a_pull_streams_its_progress(gateway: Served, node: FakeNode) -> None:
    scheduler = Scheduler(0, 250, 250, 700)
    async with client_of(gateway, node, scheduler) as client:
        lines = [p async for p in await client.pull("far:latest", stream=True)]
        assert [p.status for p in (lines[0], lines[-1])] == ["pulling manifest", "success"]
        progress = lines[1:-1]
        assert [p.completed for p in progress] == [0, 250, 700, 1000]
        assert {p.total for p in progress} == {1000}
        [digest] = {p.digest for p in progress}
        assert digest.startswith("sha256:")
        assert {p.status for p in progress} == {f"pulling {digest.removeprefix('sha256:')[:12]}"}
        assert [(p.name, p.options) for p in scheduler.pulls] == [("far", PullOptions())]


async def test_a_pull_is_answered_whole(gateway: Served, node: FakeNode) -> None:
    scheduler = Scheduler()
    scheduler._viewed.set()
    async with client_of(gateway, node, scheduler) as client:
        assert (await client.pull("far")).status == "success"
        assert (await client.pull("alpha")).status == "success", "a local directory is there"
        assert [line.status async for line in await client.pull("alpha", stream=True)][-1] == "success"
        assert len(scheduler.pulls) == 1


async def test_errors_are_the_last_line_of_a_stream(gateway: Served, node: FakeNode) -> None:
    scheduler = Scheduler()
    scheduler.error = CheckpointInvalid("shard 3 is damaged")
    async with client_of(gateway, node, scheduler) as client:
        stream = await client.pull("far", stream=True)
        assert (await anext(stream)).status == "pulling manifest"
        with pytest.raises(ollama.ResponseError, match="shard 3 is damaged"):
            await anext(stream)
        with pytest.raises(ollama.ResponseError, match="shard 3 is damaged") as failed:
            await client.pull("far")
        assert failed.value.status_code == 422
        with pytest.raises(ollama.ResponseError, match="thaw models add") as unknown:
            await client.pull("unknown")
        assert unknown.value.status_code == 404
        assert (await gateway.http.get("/api/pull")).status_code == 405


async def test_a_pull_needs_an_admin_key(node: FakeNode, serve: ServeFn) -> None:
    scheduler = Scheduler()
    scheduler._viewed.set()
    async with serve(api_keys=hash_key("sk-mine"), admin_key=SecretStr("sk-admin")) as gateway:
        for headers in ({}, {"authorization": "Bearer sk-mine"}):
            refused = await gateway.http.post("/api/pull", json={"model": "alpha"}, headers=headers)
            assert (refused.status_code, "admin key" in refused.json()["error"]) == (401, True)
        async with client_of(gateway, node, scheduler, headers={"authorization": "Bearer sk-admin"}) as client:
            assert (await client.pull("alpha")).status == "success"


async def test_a_pull_ends_with_the_gateway(node: FakeNode, serve: ServeFn) -> None:
    scheduler = Scheduler(1)
    async with serve(drain_timeout=600) as gateway:
        await until_listed(gateway, CARDS)
        async with client_of(gateway, node, scheduler) as client:
            stream = await client.pull("far", stream=True)
            await anext(stream)
            scheduler.progress += [2] * 1_000_000
            gateway.stop.set()
            with pytest.raises(ollama.ResponseError, match="shutting down"):
                [line async for line in stream]
            assert await asyncio.wait_for(gateway.task, 60) == 0
