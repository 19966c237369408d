"""Shared executors: the time from a start to its first token, and the memory of an idle model.

    python -m bench.attach [--size 5m] [--rounds 15] [--models 32] [--threads 1]
        [--parts] [--json PATH]

One node with a real nodeagent and loader, and a cpu device with memory of its own. The weights are
on the device before each start, the zygote has its imports done, and the executor hosts another
model of the same architecture. A round starts the same model both ways, in alternating order:

    shared      attached to the executor
    dedicated   forked from the zygote

Seconds are from the command to the first token of a request that is sent as soon as the instance
takes requests. `compute` is the same request to the ready instance. The figures are medians over
the rounds, and of the rounds' ratios. Tokens that differ between the ways end the run with an
error.

--parts lists when the messages of an attach passed NATS (`bench.attach_parts`). It slows the starts
down, and measures no memory.

Then --models instances of one architecture are started each way and left idle. Memory is the
proportional share of anonymous pages (`Pss_Anon`) of their processes: pages that forks share with
the zygote count once, and weights are not anonymous. The executor's is its growth for each model
after the first.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import nats
from pydantic import SecretStr

from bench.attach_parts import Tap
from bench.bare_node import BareNode, is_ready
from bench.report import median, write
from shared.contracts.models import ModelCard, ModelSpec
from shared.contracts.node import InstanceStatus
from shared.messaging import Mesh
from shared.settings import CommonSettings
from tests.support.servers import NatsServer
from thaw.demo.models import SIZES, make_demo_model

WAYS = ("shared", "dedicated")
DEVICE = "cpu:1"
_KV_BYTES = 32 << 20
_TOKENS = 4
_KIB = 1024
_MIB = 1 << 20


@dataclass(frozen=True)
class Measured:
    """Seconds to the first token after the command, and of the same request when ready."""

    ttft_s: float
    compute_s: float
    tokens: tuple[int, ...]


class Node(BareNode):
    """A node with a device of its own memory."""

    def __init__(self, url: str, mesh: Mesh, home: Path, threads: int) -> None:
        environment = {"THAW_DEVICES": f"cpu:0=1GiB,{DEVICE}=4GiB/separate", "THAW_ENGINE_THREADS": str(threads)}
        super().__init__("attach", url, mesh, home, environment)

    async def card(self, source: Path, way: str) -> ModelCard:
        spec = ModelSpec(name=source.name, source=str(source), isolation="shared" if way == "shared" else "dedicated")
        return await self.inspect(spec)

    async def attach(self, card: ModelCard) -> InstanceStatus:
        """Start an instance; return once it takes requests."""
        return await self.start(card, DEVICE, _KV_BYTES)

    async def complete(self, instance_id: str) -> tuple[float, tuple[int, ...]]:
        """Return when the first token arrived, and all tokens."""
        first, tokens = await self.ask(instance_id, "Once upon a time", _TOKENS)
        return first, tuple(tokens)

    async def measure(self, card: ModelCard) -> Measured:
        """Start an instance, have it answer twice, and stop it."""
        began = time.perf_counter()
        instance_id = (await self.attach(card)).instance_id
        first, tokens = await self.complete(instance_id)
        await self.reaches(instance_id, is_ready)
        again = time.perf_counter()
        second, _ = await self.complete(instance_id)
        await self.stop(instance_id)
        return Measured(first - began, second - again, tokens)


def anonymous_bytes(pid: int) -> int:
    """The process's proportional share of anonymous memory."""
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return next(int(line.split()[1]) * _KIB for line in rollup.splitlines() if line.startswith("Pss_Anon:"))


@contextlib.asynccontextmanager
async def node_of(home: Path, threads: int) -> AsyncIterator[Node]:
    server = NatsServer()
    mesh = Mesh(CommonSettings(nats_url=SecretStr(server.url)), "bench-attach")
    node = Node(server.url, mesh, home, threads)
    try:
        await mesh.start()
        await node.open()
        yield node
    finally:
        node.close()
        await mesh.stop()
        server.close()


@contextlib.asynccontextmanager
async def tapped(node: Node) -> AsyncIterator[Tap]:
    """Record the messages of starts, and print their times in the end."""
    client = await nats.connect(node.url)
    tap = Tap(node.name)
    try:
        await tap.listen(client)
        yield tap
    finally:
        await client.close()
    tap.print()


async def measure_starts(node: Node, model: Path, rounds: int, tap: Tap | None = None) -> dict[str, float]:
    """Measure starts of one model, both ways in each round.

    Args:
        tap: Records the attaches.
    """
    cards = {way: await node.card(model, way) for way in WAYS}
    found: dict[str, list[Measured]] = {way: [] for way in WAYS}
    for number in range(rounds + 1):
        order = WAYS if number % 2 else WAYS[::-1]
        for way in order:
            measured = await node.measure(cards[way])
            if tap is not None:
                tap.end(is_kept=bool(number) and way == "shared")
            if number:  # the first round brings the weights to the device
                found[way].append(measured)
    if len({m.tokens for ways in found.values() for m in ways}) != 1:
        raise SystemExit("the ways do not agree in their tokens")
    pairs = list(zip(found["shared"], found["dedicated"], strict=True))
    figures = {f"{way}_ttft_ms": median([m.ttft_s * 1e3 for m in found[way]]) for way in WAYS}
    figures |= {f"{way}_compute_ms": median([m.compute_s * 1e3 for m in found[way]]) for way in WAYS}
    figures |= {f"{way}_beyond_compute_ms": median([(m.ttft_s - m.compute_s) * 1e3 for m in found[way]]) for way in WAYS}
    return figures | {"dedicated_to_shared_ttft": median([d.ttft_s / s.ttft_s for s, d in pairs])}


async def measure_memory(node: Node, models: list[Path]) -> dict[str, float]:
    """Measure the memory of idle instances, each way."""
    figures: dict[str, float] = {}
    for way in WAYS:
        started: list[InstanceStatus] = []
        after_first = 0
        for model in models:
            started.append(await node.attach(await node.card(model, way)))
            await node.complete(started[-1].instance_id)
            after_first = after_first or sum(map(anonymous_bytes, started[0].pids))
        pids = {pid for status in started for pid in status.pids}
        total = sum(map(anonymous_bytes, pids))
        for status in started:
            await node.stop(status.instance_id)
        each = (total - after_first) / (len(models) - 1) if way == "shared" else total / len(models)
        figures[f"{way}_mib_per_model"] = each / _MIB
        figures[f"{way}_processes"] = len(pids)
    return figures | {"dedicated_to_shared_memory": figures["dedicated_mib_per_model"] / figures["shared_mib_per_model"]}


async def run(options: argparse.Namespace) -> dict[str, float]:
    with tempfile.TemporaryDirectory(prefix="thaw-at-") as directory:
        home = Path(directory)
        models = list(_models(home / "models", options.size, options.models))
        async with node_of(home, options.threads) as node:
            neighbour = await node.attach(await node.card(models[1], "shared"))
            await node.complete(neighbour.instance_id)
            if options.parts:
                async with tapped(node) as tap:
                    return await measure_starts(node, models[0], options.rounds, tap)
            figures = await measure_starts(node, models[0], options.rounds)
            await node.stop(neighbour.instance_id)
            return figures | await measure_memory(node, models)


def _models(directory: Path, size: str, count: int) -> Iterator[Path]:
    for seed in range(count):
        yield make_demo_model(directory / f"m{seed}", size, seed)


def main() -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="5m", choices=list(SIZES))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--models", type=int, default=32, help="idle models, at least two")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--parts", action="store_true", help="list the messages of an attach; measure no memory")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    figures = asyncio.run(run(options))
    for name, value in figures.items():
        print(f"{name:28} {value:10.2f}")
    write(options.json, figures)


if __name__ == "__main__":
    main()
