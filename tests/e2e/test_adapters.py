"""LoRA adapters on this folder's mesh, from registration to the openai client."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import nats
import openai
import pytest
import torch
from nats.aio.msg import Msg
from safetensors.torch import load_file

from shared.contracts import subjects
from shared.contracts.loader import LoaderStatus, instance_of
from tests.integration.loader.tiers_server import TierServer
from tests.support.adapters import write_adapter
from tests.support.launcher import Thaw, until

HELLO: list[Any] = [{"role": "user", "content": "Hello"}]
ASKED: dict[str, Any] = {"messages": HELLO, "temperature": 0, "max_tokens": 12}


@pytest.fixture(scope="module")
def adapters(mesh: Thaw) -> dict[str, Path]:
    """Register two adapters of model one, without loading them."""
    found = {}
    for i, name in enumerate(("sql", "poems")):
        found[name] = write_adapter(mesh.home / "adapters" / name, mesh.home / "models" / "one", seed=i, strength=0.5)
        assert mesh.json("models", "add", name, str(found[name]), "--base", "one")["added"] == [name]
    return found


@pytest.fixture
async def clients(mesh: Thaw) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{mesh.url}/v1", api_key="none", timeout=120, max_retries=0) as client:
        yield client


async def text(client: openai.AsyncOpenAI, model: str, *, stream: bool = False, **asked: Any) -> str:
    if not stream:
        answer = await client.chat.completions.create(model=model, **{**ASKED, **asked})
        assert answer.model == model
        return answer.choices[0].message.content or ""
    chunks = await client.chat.completions.create(model=model, stream=True, **{**ASKED, **asked})
    return "".join([c.choices[0].delta.content or "" async for c in chunks if c.choices])


async def test_base_and_adapters_answer_under_every_name(clients: openai.AsyncOpenAI, adapters: dict[str, Path]) -> None:
    base, sql, poems = [await text(clients, name) for name in ("one", "one:sql", "poems")]
    assert len({base, sql, poems}) == 3
    assert await text(clients, "sql", stream=True) == sql
    assert await text(clients, "one:poems", stream=True) == poems
    together = await asyncio.gather(*(text(clients, n, stream=bool(i % 2)) for i, n in enumerate(["one", "sql", "poems"] * 4)))
    assert together == [base, sql, poems] * 4


async def test_one_instance_serves_the_base_and_all_adapters(
    mesh: Thaw, clients: openai.AsyncOpenAI, adapters: dict[str, Path]
) -> None:
    await asyncio.gather(*(text(clients, name) for name in ("one", "sql", "poems")))

    def loaded() -> list[tuple[str, set[str]]]:
        found = [i for n in mesh.cluster()["nodes"] for i in n["instances"] if i["state"] == "ready"]
        mine = [i for i in found if i["model"] in ("one", *adapters)]
        return [(i["model"], {a["name"] for a in i["load"]["adapters"]}) for i in mine]

    await asyncio.to_thread(until, lambda: loaded() == [("one", {"sql", "poems"})], what=lambda: f"the adapters of one: {loaded()}")
    seen = mesh.cluster()
    assert {m["card"]["spec"]["name"]: m["state"] for m in seen["models"]}["sql"] == "loaded"
    assert "one:sql" in mesh.inside("ps")[1]


async def test_the_list_of_models_names_parents(clients: openai.AsyncOpenAI, adapters: dict[str, Path]) -> None:
    listed = {m.id: m.model_dump() for m in (await clients.models.list()).data}
    assert listed["one"]["parent"] is None
    assert (listed["sql"]["parent"], listed["sql"]["root"]) == ("one", str(adapters["sql"]))
    assert listed["sql"]["context_length"] == listed["one"]["context_length"]
    assert (await clients.models.retrieve("one:sql")).id == "sql"


@pytest.mark.parametrize("name", ["one:nothing", "two:sql", "nothing:sql", "sql:one", "one:two", ":sql", "one:"])
async def test_an_unknown_adapter_is_not_found(clients: openai.AsyncOpenAI, adapters: dict[str, Path], name: str) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        await text(clients, name)
    assert caught.value.code == "model_not_found"


async def test_request_for_an_adapter_wakes_its_base(mesh: Thaw, clients: openai.AsyncOpenAI, adapters: dict[str, Path]) -> None:
    warm = await text(clients, "sql")
    mesh.json("sleep", "one")
    assert await text(clients, "sql") == warm
    mesh.json("sleep", "one")
    assert mesh.json("wake", "one:sql")["instance_id"]
    assert "is an adapter of one" in mesh.error("sleep", "sql")["message"]


def test_incompatible_adapter_is_refused_at_registration(mesh: Thaw, admin: httpx.Client, adapters: dict[str, Path]) -> None:
    one = mesh.home / "models" / "one"
    wide = write_adapter(mesh.home / "adapters" / "wide", one, modules={"model.layers.0.self_attn.q_proj": (64, 32)})
    dora = write_adapter(mesh.home / "adapters" / "dora", one, use_dora=True)

    def refused(source: Path, base: str | None) -> tuple[int, str, str]:
        spec = {"name": "bad", "source": str(source), "base": base}
        answer = admin.post("/models", json={"specs": [spec]})
        return answer.status_code, answer.json()["error"]["code"], answer.json()["error"]["message"]

    status, code, message = refused(wide, "one")
    assert (status, code) == (422, "checkpoint_invalid")
    assert "adds [64, 32]" in message
    assert "one has [64, 64] there" in message
    assert refused(dora, "one")[:2] == (422, "invalid_model")
    assert refused(adapters["sql"], "nobody")[:2] == (404, "model_not_found")
    assert refused(adapters["sql"], "poems")[:2] == (400, "invalid_request")
    assert refused(adapters["sql"], None)[:2] == (422, "invalid_model")
    assert refused(one, "one")[:2] == (422, "invalid_model")


async def test_adapters_are_released_when_their_engine_dies(
    mesh: Thaw, clients: openai.AsyncOpenAI, adapters: dict[str, Path]
) -> None:
    before = await text(clients, "sql")
    there = mesh.instance("one")
    held: asyncio.Queue[bool] = asyncio.Queue()

    async def hear(message: Msg) -> None:
        segments = LoaderStatus.model_validate_json(message.data).segments
        held.put_nowait(any(instance_of(h) == there["instance_id"] for s in segments for h in s.holders))

    nc = await nats.connect(mesh.endpoints["nats_url"])
    try:
        await nc.subscribe(subjects.ALL_LOADER_STATUS, cb=hear)
        async with asyncio.timeout(120):
            assert await held.get()
            os.kill(there["pids"][0], signal.SIGKILL)
            while await held.get():
                continue
        assert await text(clients, "one:sql") == before
    finally:
        await nc.close()


async def test_adapter_is_loaded_while_its_base_is_still_loading(mesh: Thaw, clients: openai.AsyncOpenAI) -> None:
    """An adapter and its base load concurrently.

    The source holds back the base's last bytes until the adapter is in memory; sequential loading
    would never end.
    """
    adapter = write_adapter(mesh.home / "adapters" / "near", mesh.home / "models" / "three", seed=9, strength=0.5)
    server = TierServer(mesh.home / "models")
    received: asyncio.Queue[LoaderStatus] = asyncio.Queue()

    async def hear(message: Msg) -> None:
        received.put_nowait(LoaderStatus.model_validate_json(message.data))

    nc = await nats.connect(mesh.endpoints["nats_url"])
    try:
        mesh.json("models", "add", "far", f"{server.url}/three")
        mesh.json("models", "add", "near", str(adapter), "--base", "far")
        server.faults.stall_after = 300_000
        await nc.subscribe(subjects.ALL_LOADER_STATUS, cb=hear)
        asked = asyncio.create_task(text(clients, "near"))
        async with asyncio.timeout(120):
            while True:
                there = {s.model: s for s in (await received.get()).segments}
                # The base's size is known when its header has arrived, which may be after the
                # adapter's last byte.
                known = {"near", "far"} <= there.keys() and there["far"].total_bytes > 0
                if known and there["near"].loaded_bytes == there["near"].total_bytes > 0:
                    break
        assert there["far"].loaded_bytes < there["far"].total_bytes
        assert {instance_of(h) for h in there["near"].holders} == set(there["far"].holders)
        assert not asked.done()
        server.faults.stall_after = None
        server.unblocked.set()
        assert await asked != await text(clients, "far")
    finally:
        await nc.close()
        await asyncio.to_thread(server.close)
        mesh.json("models", "rm", "far", "--with-adapters")


async def test_converted_adapter_gives_the_same_output_until_it_is_removed(
    mesh: Thaw, clients: openai.AsyncOpenAI, adapters: dict[str, Path]
) -> None:
    pickled = mesh.home / "adapters" / "pickled"
    shutil.copytree(adapters["sql"], pickled)
    torch.save(load_file(pickled / "adapter_model.safetensors"), pickled / "adapter_model.bin")
    (pickled / "adapter_model.safetensors").unlink()
    assert "thaw convert" in mesh.error("models", "add", "converted", str(pickled), "--base", "one")["message"]
    mesh.json("convert", str(pickled), str(mesh.home / "adapters" / "converted"))
    mesh.json("models", "add", "converted", str(mesh.home / "adapters" / "converted"), "--base", "one")
    before = await text(clients, "sql")
    assert await text(clients, "converted") == before
    mesh.json("models", "rm", "converted")

    def loaded() -> set[str]:
        return {a["name"] for i in mesh.instances("one") for a in i["load"]["adapters"]}

    await asyncio.to_thread(until, lambda: "converted" not in loaded(), what="the adapter is released")
    assert await text(clients, "sql") == before


async def test_base_can_only_be_removed_with_its_adapters(
    mesh: Thaw, clients: openai.AsyncOpenAI, adapters: dict[str, Path]
) -> None:
    assert "has the adapters poems, sql" in mesh.error("models", "rm", "one")["message"]
    mesh.json("models", "rm", "poems")
    with pytest.raises(openai.NotFoundError):
        await text(clients, "poems")
    assert await text(clients, "sql")
    mesh.json("models", "rm", "one", "--with-adapters")
    assert {m.id for m in (await clients.models.list()).data} == {"two", "three"}
