"""Time to the first token with real engines on a device that keeps weights, for bench.reuse.

Each way is a node of its own: nodeagent, zygote and loader. The benchmark is their scheduler and
gateway: it starts an instance, sends a batch of requests as soon as the engine accepts them, and
stops the instance, as in Tangram (keep-alive 0). The times begin with the start command:

    load   the loader's copy to the device, with the reservation of pages
    TTFT   until the first token of each of the batch's requests; their mean

The tokens of each request are compared with those of an engine on a unified device.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import random
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from pydantic import SecretStr

from bench import reuse_loader, reuse_zygote
from bench.bare_node import WITHIN_S, BareNode, Tokens, is_ready
from bench.papers import tangram as t
from bench.papers.constants import tangram as c
from bench.papers.tangram_fig12 import pool as grown_pool
from bench.reuse_models import CONTEXT, device_bytes, pages, write_models
from shared.contracts import subjects
from shared.contracts.audit import AuditMemory, DeviceAudit, MemoryAudited
from shared.contracts.loader_socket import loader_socket
from shared.contracts.models import ModelCard, ModelSpec
from shared.contracts.phases import Phase, measure_covered
from shared.messaging import Mesh
from shared.settings import CommonSettings
from tests.support.servers import NatsServer
from weights.kv_lease import KvLease, Lent, Shrink
from weights.store.units import PAGE_BYTES, pages_of

DEVICE, UNIFIED = "cpu:1", "cpu:0"
PROMPT_TOKENS = (4, 12)
OUTPUT_TOKENS = 8


@dataclass(frozen=True)
class Way:
    """How a node treats weights and KV caches.

    Attributes:
        reclaim: Of `bench.reuse_loader`.
        kv: Of `bench.reuse_zygote`.
        overlap: Compute prompts while weights arrive.
    """

    name: str
    reclaim: str
    kv: str
    overlap: bool = False


BASE = "whole"
WAYS = (
    Way(BASE, "none", "booked"),
    Way("reuse", "cost", "booked"),
    Way("elastic", "cost", "elastic"),
    Way("overlap", "cost", "elastic", overlap=True),
)


@dataclass(frozen=True)
class Measured:
    """One start and its batch.

    Attributes:
        keepable: The part of the device that could keep other units at the end of the batch.
    """

    load_s: float
    ttft_s: float
    first_s: float
    keepable: float


class BenchNode(BareNode):
    """A node that treats memory in one way."""

    def __init__(self, way: Way, url: str, mesh: Mesh, home: Path, device: str) -> None:
        home = home / way.name
        home.mkdir()
        environment = {
            "THAW_DEVICES": f"{UNIFIED}=4GiB,{DEVICE}={device}",
            "THAW_PEER_HOST": "",
            "THAW_DRAM_BYTES": "0",
            "THAW_DRAM_READY_BYTES": "0",
            "THAW_ZYGOTE_MODULE": "bench.reuse_zygote",
            "THAW_ENGINE_THREADS": "1",
            "THAW_ENGINE_OVERLAP": str(way.overlap).lower(),
            reuse_loader.VARIABLE: way.reclaim,
            reuse_zygote.VARIABLE: way.kv,
        }
        super().__init__(f"reuse-{way.name}", url, mesh, home, environment, loader="bench.reuse_loader")
        self.way = way

    async def card(self, name: str, source: Path, concurrency: int) -> ModelCard:
        return await self.inspect(ModelSpec(name=name, source=str(source), max_concurrency=concurrency))

    async def serve(
        self, card: ModelCard, prompts: Sequence[Tokens], kv_bytes: int, device: str = DEVICE
    ) -> tuple[Measured, list[Tokens]]:
        """Start an instance, have it answer a batch, and stop it."""
        instance = f"{card.name}-{self.next_token():x}"
        books = device == DEVICE and self.way.kv == "booked"
        async with self._booked(instance, pages_of(kv_bytes) if books else 0):
            began = time.perf_counter()
            await self.start(card, device, kv_bytes, instance)
            answers = await asyncio.gather(*(self.ask(instance, p, OUTPUT_TOKENS) for p in prompts))
            audit = await self._audit()
            ready = await self.reaches(instance, lambda i: is_ready(i) and bool(i.phases))
            await self.stop(instance)
        await self._wait_until_freed()
        firsts = [first - began for first, _ in answers]
        load_ms = measure_covered((s.start_ms, s.end_ms) for s in ready.phases if s.phase in (Phase.LOAD, Phase.FETCH))
        keepable = (audit.free_pages + audit.reusable_pages) / audit.total_pages
        return Measured(load_ms / 1e3, fmean(firsts), min(firsts), keepable), [tokens for _, tokens in answers]

    @contextlib.asynccontextmanager
    async def _booked(self, instance: str, count: int) -> AsyncIterator[None]:
        """Take the pages of a KV cache that is booked whole before the load."""
        if not count:
            yield
            return
        loop, lent, held = asyncio.get_running_loop(), asyncio.Event(), 0

        def deliver(message: Lent | Shrink) -> None:
            nonlocal held
            held += message.more if isinstance(message, Lent) else 0
            if held >= count:
                loop.call_soon_threadsafe(lent.set)

        socket = loader_socket(self.home / "nodes" / self.name)
        lease = KvLease(socket, DEVICE, f"{instance}-kv", count, deliver)
        try:
            async with asyncio.timeout(WITHIN_S):
                await lent.wait()
            yield
        finally:
            await asyncio.to_thread(lease.close)

    async def _audit(self) -> DeviceAudit:
        """Return the device's pages. Stop if they are not conserved."""
        found = await self.mesh.request(subjects.loader_command(self.name), AuditMemory(), MemoryAudited)
        [device] = [d for d in found.devices if d.device_id == DEVICE]
        if device.violations:
            raise SystemExit(f"{self.way.name}: {device.violations}")
        return device

    async def _wait_until_freed(self) -> None:
        """Wait until no page is mapped or lent."""
        async with asyncio.timeout(WITHIN_S):
            while True:
                self.loader_reported.clear()
                audit = await self._audit()
                if not audit.mapped_pages and not audit.lent_pages:
                    return
                await self.loader_reported.wait()


class Bed:
    """The nodes, their models, and the expected tokens."""

    def __init__(self, nodes: Sequence[BenchNode], models: dict[str, Path], options: argparse.Namespace) -> None:
        self.nodes, self._models, self._options = nodes, models, options
        self._device_bytes = device_bytes(list(models.values()))
        self.cards: dict[str, ModelCard] = {}
        self._prompts: dict[str, list[Tokens]] = {}
        self._expected: dict[str, list[Tokens]] = {}

    async def open(self) -> None:
        """Compute the expected tokens, with engines on a unified device."""
        largest = max(self._options.batches)
        for node in self.nodes:
            await node.open()
        for seed, (name, source) in enumerate(self._models.items()):
            card = self.cards[name] = await self.nodes[0].card(name, source, largest)
            draw = random.Random(seed)
            self._prompts[name] = [[draw.randrange(300, 1000) for _ in range(draw.randint(*PROMPT_TOKENS))] for _ in range(largest)]
            whole = largest * CONTEXT * card.info.kv_bytes_per_token
            _, self._expected[name] = await self.nodes[0].serve(card, self._prompts[name], whole, UNIFIED)

    def kv_bytes(self, name: str, batch: int) -> int:
        """Return a cache for a batch of full contexts, or all of the device beside the weights."""
        rest = self._device_bytes - pages(self._models[name]) * PAGE_BYTES
        return min(batch * CONTEXT * self.cards[name].info.kv_bytes_per_token, rest)

    async def request(self, node: BenchNode, name: str, batch: int) -> Measured:
        found, tokens = await node.serve(self.cards[name], self._prompts[name][:batch], self.kv_bytes(name, batch))
        if tokens != self._expected[name][:batch]:
            raise SystemExit(f"{node.way.name}: {name} has other tokens than on a unified device")
        return found


@contextlib.asynccontextmanager
async def bed(options: argparse.Namespace, directory: Path) -> AsyncIterator[Bed]:
    """Start the nodes."""
    models = write_models(directory / "models", grown_pool(options.pool), options.engine_scale)
    pace = round(c.PCIE.value * 1e9 / options.engine_scale)
    device = f"{device_bytes(list(models.values()))}/separate@{pace}/s"
    nats = NatsServer()
    mesh = Mesh(CommonSettings(nats_url=SecretStr(nats.url)), "bench-reuse")
    chosen = [w for w in WAYS if w.name == BASE or w.name in options.ways]
    nodes: list[BenchNode] = []
    try:
        await mesh.start()
        nodes += [BenchNode(way, nats.url, mesh, directory, device) for way in chosen]
        found = Bed(nodes, models, options)
        await found.open()
        yield found
    finally:
        for node in nodes:
            node.close()
        await mesh.stop()
        nats.close()


Found = dict[tuple[str, int, str], list[tuple[str, Measured]]]
"""By locality, batch and way: the models asked for and their starts."""


async def measure(options: argparse.Namespace) -> Found:
    """Send the same sequence to all nodes in turn, for each locality and batch size."""
    measured: Found = defaultdict(list)
    with tempfile.TemporaryDirectory(prefix="thaw-bench-reuse-", dir=options.disk) as directory:
        async with bed(options, Path(directory)) as found:
            for level, batch in itertools.product(options.levels, options.batches):
                asked = t.sequence(list(found.cards), level, options.engine_requests, 1.0, options.seed)
                for n, request in enumerate(asked):
                    for k in range(len(found.nodes)):
                        node = found.nodes[(n + k) % len(found.nodes)]
                        one = await found.request(node, request.model, batch)
                        measured[level, batch, node.way.name].append((request.model, one))
    return measured


def report(found: Found) -> dict[str, float]:
    """Print means and ratios to whole-model loads, and return the figures."""
    figures: dict[str, float] = {}
    for (level, batch, way), starts in found.items():
        whole = found[level, batch, BASE]
        means = {name: fmean(getattr(one, name) for _, one in starts) for name in ("load_s", "ttft_s", "first_s", "keepable")}
        base = {name: fmean(getattr(one, name) for _, one in whole) for name in ("load_s", "ttft_s")}
        sooner, shorter = base["load_s"] / max(means["load_s"], 1e-9), 1 - means["ttft_s"] / base["ttft_s"]
        key = f"engines_{level}_batch_{batch}_{way}"
        figures |= {f"{key}_{name.removesuffix('_s')}_ms": 1e3 * means[name] for name in ("load_s", "ttft_s", "first_s")}
        figures |= {f"{key}_keepable": means["keepable"], f"{key}_load_sooner": sooner, f"{key}_ttft_shorter": shorter}
        print(
            f"{level} batch {batch:2} {way:7} load {1e3 * means['load_s']:7.1f} ms ({sooner:5.2f} x sooner), "
            f"TTFT {1e3 * means['ttft_s']:7.1f} ms ({100 * shorter:4.0f} % shorter); "
            f"{100 * means['keepable']:3.0f} % of the device free or reusable (paced)",
            flush=True,
        )
    print(f"all tokens of {sum(map(len, found.values()))} batches are those of engines on a unified device")
    return figures
