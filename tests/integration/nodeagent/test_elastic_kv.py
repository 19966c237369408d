"""Real engines whose KV caches borrow a device's pages, under a real nodeagent and loader.

Their caches together exceed the device (ADR 0056). A third model loads meanwhile. Engine and loader
are killed.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from shared.contracts import subjects
from shared.contracts.audit import AuditMemory, DeviceAudit, MemoryAudited
from shared.contracts.base import Done
from shared.contracts.inference import InferChunk, InferFinished
from shared.contracts.loader import DeviceMemory, LoaderStatus
from shared.contracts.loader_socket import loader_socket
from shared.contracts.models import ModelCard
from shared.contracts.node import InstanceState, StartInstance
from shared.settings import NodeSettings
from shared.sizing import MIB, need_of
from tests.integration.nodeagent.harness import Node, gone, running_node
from tests.integration.nodeagent.loaders import Loaders
from tests.support.engines import Engines, Stream
from tests.support.servers import NatsServer
from thaw.demo.models import make_demo_model
from weights.formats.checkpoint import open_checkpoint
from weights.formats.segment import lay_out
from weights.kv_lease import KvLease
from weights.store.units import PAGE_BYTES, cut_units

pytestmark = pytest.mark.slow
KV_BYTES = 16 * MIB
FLOOR_BYTES = 4 * MIB
RUNTIME_BYTES = 256 * MIB
BALLAST = "ballast"
"""Borrows the pages that are booked for the engines' processes and the third model, so that the
device is small."""
REQUESTS = 4
"""For each model. Each has 9 blocks of 384 KiB after its prompt, all of a model 14 MiB."""


@dataclass
class Mesh:
    """A node with a small separate device, its loader, and requests to its engines."""

    node: Node
    loaders: Loaders
    engines: Engines

    async def card(self, name: str, source: Path) -> ModelCard:
        found = await self.loaders.card(name, source)
        return found.model_copy(update={"spec": found.spec.model_copy(update={"dtype": "float32", "max_concurrency": REQUESTS})})

    async def starts(self, instance_id: str, card: ModelCard, device: str = "cpu:1") -> int:
        """Start an instance; return its process."""
        need = need_of(card)
        command = StartInstance(
            token=self.node.next_token(),
            plan_id="p",
            instance_id=instance_id,
            card=card,
            device_ids=(device,),
            reserve_bytes=need.total - need.kv + KV_BYTES,
            kv_bytes=KV_BYTES,
        )
        await self.node.mesh.request(subjects.node_command(self.node.name), command, Done)
        status = await self.node.reaches(instance_id, InstanceState.READY, InstanceState.FAILED, within=120)
        assert status.error is None, status.error
        return status.pids[0]

    async def asks(self, instance_id: str) -> list[Stream]:
        """Send long requests."""
        return [
            await self.engines.ask(
                instance_id,
                "completion",
                prompt=list(range(5 + n, 1105 + n)),
                max_tokens=80,
                temperature=0,
                ignore_eos=True,
                deadline_ms=300_000,
            )
            for n in range(REQUESTS)
        ]

    async def audit(self) -> DeviceAudit:
        """Return the audit of the separate device, which has to be correct."""
        answer = await self.node.mesh.request(subjects.loader_command(self.node.name), AuditMemory(), MemoryAudited)
        [found] = answer.devices
        assert found.violations == ()
        assert found.free_pages + found.mapped_pages + found.reusable_pages + found.lent_pages == found.total_pages
        return found


async def tokens(streams: list[Stream]) -> list[list[int]]:
    """Return the tokens of complete responses."""
    for stream in streams:
        last = await stream.last()
        assert isinstance(last, InferFinished), last
    return [stream.tokens() for stream in streams]


async def begun(streams: list[Stream]) -> None:
    await streams[0].until(lambda r: any(isinstance(m, InferChunk) for m in r))


def lent(memory: DeviceMemory) -> dict[str, int]:
    return {k.instance_id: k.lent_bytes for k in memory.kv if k.instance_id != BALLAST}


@pytest.mark.timeout(400)
async def test_caches_that_exceed_the_device_take_turns_and_give_way(nats_server: NatsServer, tmp_path: Path) -> None:
    sources = {name: make_demo_model(tmp_path / name, "5m", seed=n) for n, name in enumerate("abc")}
    weights = sum(u.pages for u in cut_units(lay_out(open_checkpoint(sources["a"]), "").tensors, {}, "")) * PAGE_BYTES
    ballast = 3 * RUNTIME_BYTES
    size = 3 * (weights + FLOOR_BYTES) + KV_BYTES - FLOOR_BYTES + ballast
    settings = {
        "THAW_ZYGOTE": "true",
        "THAW_ZYGOTE_MODULE": "services.engine.zygote",
        "THAW_ENGINE_THREADS": "1",
        "THAW_DEVICES": f"cpu:0=2GiB,cpu:1={size}/separate",
        "THAW_DRAM_BYTES": "0",
    }
    async with running_node(nats_server.url, tmp_path, **settings) as node:
        await node.loader_off()
        loaders, engines = Loaders(node), Engines(node.mesh, node.name, nats_server.url, tmp_path)
        await node.mesh.listen(subjects.loader_status(node.name), LoaderStatus, loaders.hear).start()
        await loaders.start()
        mesh = Mesh(node, loaders, engines)
        socket = loader_socket(NodeSettings(home=node.home, node=node.name).node_state)
        lease = KvLease(socket, "cpu:1", BALLAST, (ballast + weights) // PAGE_BYTES, lambda _: None)
        try:
            cards = {name: await mesh.card(name, source) for name, source in sources.items()}
            assert need_of(cards["a"]).kv_floor == FLOOR_BYTES
            assert need_of(cards["a"]).converted + need_of(cards["a"]).runtime <= RUNTIME_BYTES
            await loaders.memory(lambda m: m.lent_bytes == ballast + weights)
            expected = {}
            for name in "ab":
                await mesh.starts(f"host-{name}", cards[name], "cpu:0")
                expected[name] = await tokens(await mesh.asks(f"host-{name}"))
            await give_way(mesh, cards, expected, lease, weights)
        finally:
            lease.close()
            assert loaders.process is not None
            loaders.process.terminate()
            assert await gone(loaders.process.pid)
            loaders.process.wait()


async def give_way(
    mesh: Mesh, cards: dict[str, ModelCard], expected: dict[str, list[list[int]]], lease: KvLease, weights: int
) -> None:
    first, second = await mesh.starts("a-1", cards["a"]), await mesh.starts("b-1", cards["b"])
    streams = {name: await mesh.asks(f"{name}-1") for name in "ab"}
    for found in streams.values():
        await begun(found)
    full = await mesh.loaders.memory(lambda m: not m.free_bytes and sum(k.wanted_bytes for k in m.kv) > m.lent_bytes)
    assert set(lent(full)) == {"a-1", "b-1"}

    lease.demand(3 * RUNTIME_BYTES // PAGE_BYTES)
    lease.give_back(weights // PAGE_BYTES)
    third = await mesh.starts("c-1", cards["c"])  # caches return the pages
    assert (await mesh.audit()).mapped_pages * PAGE_BYTES == 3 * weights
    for name, found in streams.items():
        assert await tokens(found) == expected[name]

    streams = {name: await mesh.asks(f"{name}-1") for name in "ab"}
    for found in streams.values():
        await begun(found)
    psutil.Process(first).kill()
    after = await mesh.loaders.memory(lambda m: "a-1" not in lent(m))
    assert after.lent_bytes == sum(k.lent_bytes for k in after.kv)
    assert await tokens(streams["b"]) == expected["b"]
    await mesh.audit()

    again = await mesh.asks("b-1")
    await begun(again)
    assert mesh.loaders.process is not None
    mesh.loaders.process.kill()
    mesh.loaders.process.wait()
    await mesh.loaders.start()
    assert await tokens(again) == expected["b"]
    await mesh.loaders.memory(lambda m: {"b-1", "c-1"} <= lent(m).keys())
    await mesh.audit()
    for instance_id, pid in (("b-1", second), ("c-1", third)):
        await mesh.node.stop(instance_id)
        assert await gone(pid)
    await mesh.loaders.memory(lambda m: not lent(m) and m.free_bytes + 3 * RUNTIME_BYTES == m.total_bytes)
    await mesh.audit()
