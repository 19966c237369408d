"""Reuse of weights on a separate device (Tangram Fig. 8 to 12): `python -m bench.reuse`.

`loaders`: four loader processes serve the same sequence of requests in turn: one that copies the
whole model for each request (as ServerlessLLM does), and three that keep units and reclaim them by
expected cost, least recent use, or at random. A request attaches the model on the device, compares
the hash of every byte that an engine would map, and releases it. All missing bytes are in host
memory or the page cache, as in the paper (section 5.1). --seeds runs several sequences.

`engines`: whole nodes serve batches with real engines: loads of whole models, reuse, and reuse with
elastic KV caches, by locality and batch size, with load time and TTFT (bench/reuse_engines.py).

`moves`: what defragmentation costs (bench/reuse_remap.py).

Sizes are those of Table 1, and the pace is the paper's PCIe bandwidth, both divided by --scale
(--engine-scale); the loaders' pace is multiplied by --speed. The devices are PACED: seconds are
comparable with each other only.

The default run takes about ten minutes on an idle machine. The full ones:

    python -m bench.reuse --part loaders --scale 200 --speed 1 --requests 100 --seeds 5
    python -m bench.reuse --part engines --engine-requests 40 --batches 1 16 64 --ways reuse elastic
        overlap
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, product
from pathlib import Path
from statistics import fmean

import numpy as np
from nats.aio.msg import Msg
from pydantic import SecretStr
from safetensors.numpy import save_file

from bench import reuse_engines, reuse_remap
from bench.papers import tangram as t
from bench.papers.constants import tangram as c
from bench.papers.tangram_fig12 import pool as grown_pool
from bench.report import median, write
from bench.reuse_loader import POLICIES, VARIABLE
from shared.contracts import subjects
from shared.contracts.audit import AuditMemory, MemoryAudited
from shared.contracts.loader import AttachWeights, Inspected, InspectModel, ReleaseWeights, WeightsAttached, WeightsReleased
from shared.contracts.models import ModelCard, ModelSpec
from shared.contracts.segment import PagesHandle
from shared.errors import Unreachable
from shared.mapping import map_extents
from shared.messaging import Mesh
from shared.settings import CommonSettings
from tests.support.servers import NatsServer
from weights.convert.job import convert
from weights.pool import shm
from weights.store.units import PAGE_BYTES

PARTS = ("loaders", "engines", "moves")
WITHIN_S = 60.0
DEVICE = "cpu:1"
CONFIG = '{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, '
CONFIG += '"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}'


@dataclass
class Arm:
    """A loader process with one way to reclaim, and what its requests took."""

    policy: str
    node: str
    process: subprocess.Popen[bytes]
    seconds: dict[tuple[str, int, str], list[float]] = field(default_factory=lambda: defaultdict(list))
    """By locality, seed and model."""
    requests: int = 0

    def seconds_at(self, level: str, seed: int | None = None, model: str | None = None) -> list[float]:
        """Return the seconds at a locality, of all seeds and models or of one."""
        chosen = [
            times
            for (at, of_seed, of_model), times in self.seconds.items()
            if at == level and seed in (None, of_seed) and model in (None, of_model)
        ]
        return list(chain.from_iterable(chosen))


class Bed:
    """The arms, their models, and the connection to them."""

    def __init__(self, mesh: Mesh, options: argparse.Namespace) -> None:
        self.mesh, self.options = mesh, options
        self.cards: dict[str, ModelCard] = {}
        self.hashes: dict[str, str] = {}

    async def open(self, arms: Sequence[Arm], models: dict[str, Path]) -> None:
        """Wait for the arms, and inspect the models."""
        for arm in arms:
            await self._serve_arm(arm)
        for name, source in models.items():
            ask = InspectModel(spec=ModelSpec(name=name, source=str(source)))
            info = (await self.mesh.request(subjects.loader_command(arms[0].node), ask, Inspected)).info
            self.cards[name] = ModelCard(spec=ask.spec, info=info, created=0)

    async def _serve_arm(self, arm: Arm) -> None:
        received = asyncio.Event()

        async def hear(_: Msg) -> None:
            received.set()

        await self.mesh.nc.subscribe(subjects.loader_status(arm.node), cb=hear)
        async with asyncio.timeout(WITHIN_S):
            while True:
                received.clear()
                try:
                    await self.check_audit(arm)
                    return
                except Unreachable:
                    await received.wait()

    async def request(self, arm: Arm, name: str) -> float:
        """Load a model, verify it and release it; return the seconds of the load."""
        arm.requests += 1
        instance, command = f"{name}-{arm.requests}", subjects.loader_command(arm.node)
        ask = AttachWeights(instance_id=instance, card=self.cards[name], until="complete", device=DEVICE)
        began = time.perf_counter()
        found = await self.mesh.request(command, ask, WeightsAttached)
        took = time.perf_counter() - began
        if not isinstance(found.handle, PagesHandle):
            raise SystemExit(f"{arm.policy}: {name} is not on {DEVICE}: {found.device_error}")
        if self.hashes.setdefault(name, content := hash_of(found.handle)) != content:
            raise SystemExit(f"{arm.policy}: {name} has wrong bytes")
        await self.mesh.request(command, ReleaseWeights(instance_id=instance), WeightsReleased)
        return took

    async def check_audit(self, arm: Arm) -> None:
        """Stop if pages of the arm's device are not conserved."""
        found = await self.mesh.request(subjects.loader_command(arm.node), AuditMemory(), MemoryAudited)
        for device in found.devices:
            if device.violations:
                raise SystemExit(f"{arm.policy}: {device.violations}")


def hash_of(handle: PagesHandle) -> str:
    """Hash what an engine maps."""
    mapped, digest = map_extents(shm.SHM / handle.file, handle.extents), hashlib.sha256()
    try:
        for unit in handle.units:
            digest.update(mapped[unit.start : unit.start + unit.nbytes])
    finally:
        mapped.close()
    return digest.hexdigest()


def write_models(directory: Path, models: Sequence[c.Model], scale: float) -> dict[str, Path]:
    """Write converted checkpoints of units of one page."""
    found = {}
    for seed, (name, model) in enumerate(zip(t.name_copies(models), models, strict=True)):
        source, generator = directory / "original" / name, np.random.default_rng(seed)
        source.mkdir(parents=True)
        (source / "config.json").write_text(CONFIG)
        (source / "tokenizer.json").write_text("{}")
        count = max(1, round(model.gb * 1e9 / scale / PAGE_BYTES))
        tensors = {f"t{n:05}": generator.random(PAGE_BYTES // 4, np.float32) for n in range(count)}
        save_file(tensors, source / "model.safetensors")
        convert(source, directory / name)
        found[name] = directory / name
    return found


def start(policy: str, url: str, directory: Path, options: argparse.Namespace) -> Arm:
    """Start the loader of one arm."""
    size = round(c.DEVICE_GB.value * 1e9 / options.scale)
    pace = round(c.PCIE.value * 1e9 / options.scale * options.speed)
    environment = {
        "THAW_NATS_URL": url,
        "THAW_HOME": str(directory / "home"),
        "THAW_NODE": f"bench-{policy}",
        "THAW_LOG_LEVEL": "error",
        "THAW_PEER_HOST": "",
        "THAW_DEVICES": f"{DEVICE}={size}/separate@{pace}/s",
        "THAW_DRAM_BYTES": str(2 * round(options.pool * 1e9 / options.scale)),
        "THAW_DRAM_READY_BYTES": "0",
        VARIABLE: policy,
    }
    process = subprocess.Popen([sys.executable, "-m", "bench.reuse_loader"], env={**os.environ, **environment})
    return Arm(policy, environment["THAW_NODE"], process)


@contextlib.asynccontextmanager
async def bed(options: argparse.Namespace, directory: Path) -> AsyncIterator[tuple[Bed, list[Arm]]]:
    """Start the arms."""
    models = write_models(directory / "models", grown_pool(options.pool), options.scale)
    nats = NatsServer()
    arms: list[Arm] = []
    mesh = Mesh(CommonSettings(nats_url=SecretStr(nats.url)), "bench-reuse")
    try:
        arms += [start(policy, nats.url, directory, options) for policy in POLICIES]
        await mesh.start()
        found = Bed(mesh, options)
        await found.open(arms, models)
        yield found, arms
    finally:
        await mesh.stop()
        for arm in arms:
            arm.process.terminate()
        for arm in arms:
            arm.process.wait(30)
        nats.close()


async def measure(options: argparse.Namespace) -> list[Arm]:
    """Send the sequences of all levels to all arms in turn."""
    with tempfile.TemporaryDirectory(prefix="thaw-bench-reuse-", dir=options.disk) as directory:
        async with bed(options, Path(directory)) as (found, arms):
            for name in found.cards:  # from now on host memory has them
                for arm in arms:
                    await found.request(arm, name)
            for level, seed in product(options.levels, range(options.seed, options.seed + options.seeds)):
                for n, asked in enumerate(t.sequence(list(found.cards), level, options.requests, 1.0, seed)):
                    for k in range(len(arms)):
                        arm = arms[(n + k) % len(arms)]
                        arm.seconds[level, seed, asked.model].append(await found.request(arm, asked.model))
                for arm in arms:
                    await found.check_audit(arm)
            return arms


def report(arms: Sequence[Arm], levels: Sequence[str]) -> dict[str, float]:
    """Print ratios to whole-model loads, and return the figures."""
    figures: dict[str, float] = {}
    whole = next(a for a in arms if a.policy == "none")
    for level, arm in product(levels, arms):
        models = sorted({m for at, _, m in whole.seconds if at == level})
        seeds = sorted({seed for at, seed, _ in whole.seconds if at == level})
        by_model = [sum(whole.seconds_at(level, model=m)) / sum(arm.seconds_at(level, model=m)) for m in models]
        by_seed = [sum(whole.seconds_at(level, seed)) / sum(arm.seconds_at(level, seed)) for seed in seeds]
        times = arm.seconds_at(level)
        mean = sum(whole.seconds_at(level)) / sum(times)
        figures |= {
            f"{level}_{arm.policy}_load_ms": 1e3 * fmean(times),
            f"{level}_{arm.policy}_load_p50_ms": 1e3 * median(times),
            f"{level}_{arm.policy}_sooner": mean,
            f"{level}_{arm.policy}_sooner_best_model": max(by_model),
            f"{level}_{arm.policy}_sooner_least_model": min(by_model),
            f"{level}_{arm.policy}_sooner_best_seed": max(by_seed),
            f"{level}_{arm.policy}_sooner_least_seed": min(by_seed),
        }
        print(
            f"{level} {arm.policy:7} mean {1e3 * fmean(times):7.1f} ms, median {1e3 * median(times):7.1f} ms (paced); "
            f"{mean:5.2f} x sooner than whole models, by seed {min(by_seed):.2f} to {max(by_seed):.2f}, "
            f"by model {min(by_model):.2f} to {max(by_model):.2f}",
            flush=True,
        )
    return figures


CHURN = reuse_remap.Churn()
"""Before its end, the order of loads has mixed the free pages."""


def report_moves(options: argparse.Namespace) -> dict[str, float]:
    """Print what defragmentation costs (Fig. 10)."""
    speed, figures = reuse_remap.copy_gb_per_s(), dict[str, float]()
    for name, run_pages in (("units", reuse_remap.LAYER_PAGES), ("pages", 1)):
        ours = reuse_remap.remap(8 * reuse_remap.GIB, run_pages, options.rounds)
        figures |= {f"remap_{name}_{k}": v for k, v in ours.items()}
        print(
            f"remap 8 GiB of scattered {name}: 0 bytes moved; {ours['reserve_ms']:.2f} ms to reserve the pages, "
            f"{ours['map_ms']:.2f} ms for {ours['mappings']:.0f} mappings in the engine"
        )
    figures |= _report_churn(options.rounds)
    print(f"this machine copies {speed:.1f} GB/s")
    figures["copy_gb_per_s"] = speed
    for name, found in reuse_remap.moving(max(30, options.requests)).items():
        ms = found["moved_bytes"] / speed / 1e6
        print(f"{name:9} (simulated pool of 45 GB): {found['moved_bytes'] / 1e9:.2f} GB moved a load, {ms:.0f} ms at that speed")
        figures |= {
            f"{name}_moved_gb": found["moved_bytes"] / 1e9,
            f"{name}_move_ms": ms,
            f"{name}_compute_ms": found["compute_ms"],
        }
    return figures


def _report_churn(rounds: int) -> dict[str, float]:
    """Print the runs of pages after many loads: as they are, and if units spared no free pages."""
    churned = [[reuse_remap.churn(CHURN, seed, spares=spares) for spares in (True, False)] for seed in range(rounds)]
    figures = {f"churn_history_{k}": v for k, v in CHURN.figures().items()} | {"churn_history_seeds": float(rounds)}
    for arm, name in enumerate(("churn", "churn_unspared")):
        found = {k: median([c[arm][k] for c in churned]) for k in churned[0][arm]}
        figures |= {f"{name}_{k}": v for k, v in found.items()}
        most = max(c[arm]["most_runs"] for c in churned)
        print(
            f"{name}: after {CHURN.loads} loads of {CHURN.models} models beside a KV cache of up to {CHURN.kv_pages} pages, {rounds} seeds, "
            f"each 8 GiB: {found['runs']:.0f} runs of pages (at most {most:.0f}), {found['map_ms']:.2f} ms to map "
            f"({found['map_cpu_ms']:.2f} ms of CPU time); {found['free_pages']:.0f} of {CHURN.pages} pages stay free, "
            f"{found['copied_gb']:.0f} GB copied in all"
        )
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=PARTS, action="append", help="all of them by default")
    parser.add_argument("--scale", type=float, default=800.0, help="divides sizes and bandwidth of the paper, for the loaders")
    parser.add_argument("--speed", type=float, default=2.0, help="multiplies the loaders' pace")
    parser.add_argument("--requests", type=int, default=16, help="to the loaders, of each locality and seed")
    parser.add_argument("--seeds", type=int, default=3, help="sequences of each locality for the loaders")
    parser.add_argument("--engine-scale", type=float, default=100.0, help="as --scale, for the engines")
    parser.add_argument("--engine-requests", type=int, default=8, help="to the engines, of each locality and batch size")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16], metavar="N", help="requests to each start of an engine")
    parser.add_argument("--ways", nargs="*", choices=[w.name for w in reuse_engines.WAYS[1:]], default=["reuse", "elastic"])
    parser.add_argument("--levels", nargs="+", choices=tuple(c.CV), default=tuple(c.CV), metavar="LEVEL")
    parser.add_argument(
        "--pool", type=float, default=120.0, metavar="GB", help="size of all models together, before scaling (Fig. 12)"
    )
    parser.add_argument("--rounds", type=int, default=9, help="of remapping")
    parser.add_argument("--seed", type=int, default=0, help="the first one")
    parser.add_argument("--disk", type=Path, default=Path(tempfile.gettempdir()), help="where the models are written")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    parts, figures = options.part or PARTS, dict[str, float]()
    if "loaders" in parts:
        figures |= report(asyncio.run(measure(options)), options.levels)
    if "engines" in parts:
        figures |= reuse_engines.report(asyncio.run(reuse_engines.measure(options)))
    if "moves" in parts:
        figures |= report_moves(options)
    write(options.json, figures, add=options.part is not None)


if __name__ == "__main__":
    main()
