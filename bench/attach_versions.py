"""Attaches of two versions of the services by turns, for machines that do other work as well.

    python -m bench.attach_versions --before DIRECTORY [--size 5m] [--rounds 60] [--threads 1]
        [--json PATH]

DIRECTORY is a checkout of the version to compare with. Both versions have a node of their own, as
in `bench.attach`, and the client's side of this checkout. Each round starts one instance on each
node, in alternating order, and stops it.

CPU time is that of the loader, the nodeagent and the executor from the command to the first token.
All figures are medians, and ratios of medians.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from bench.attach import Node, node_of
from bench.bare_node import is_ready
from bench.report import median, write
from shared.contracts.models import ModelCard
from thaw.demo.models import SIZES, make_demo_model

VERSIONS = ("before", "after")
PROCESSES = ("loader", "nodeagent", "executor")
_SCHEDULED = 2
"""The kernel's number for the clock of a process's time on CPUs (CPUCLOCK_SCHED)."""


@dataclass
class Version:
    """A node of one version, and its measurements in milliseconds."""

    node: Node
    card: ModelCard
    pids: tuple[int, ...]
    """Ids of `PROCESSES`, in their order."""
    ttft_ms: list[float] = field(default_factory=list)
    compute_ms: list[float] = field(default_factory=list)
    cpu_ms: list[tuple[float, ...]] = field(default_factory=list)

    def figures(self, name: str) -> dict[str, float]:
        beyond = median([t - c for t, c in zip(self.ttft_ms, self.compute_ms, strict=True)])
        found = {
            f"{name}_ttft_ms": median(self.ttft_ms),
            f"{name}_compute_ms": median(self.compute_ms),
            f"{name}_beyond_compute_ms": beyond,
            f"{name}_cpu_ms": median([sum(each) for each in self.cpu_ms]),
        }
        return found | {f"{name}_{p}_cpu_ms": median([each[i] for each in self.cpu_ms]) for i, p in enumerate(PROCESSES)}

    async def measure(self) -> None:
        """Attach an instance, have it answer twice, and stop it."""
        before, began = self._cpu_s(), time.perf_counter()
        instance_id = (await self.node.attach(self.card)).instance_id
        first, _ = await self.node.complete(instance_id)
        after = self._cpu_s()
        await self.node.reaches(instance_id, is_ready)
        again = time.perf_counter()
        second, _ = await self.node.complete(instance_id)
        await self.node.stop(instance_id)
        self.ttft_ms.append((first - began) * 1e3)
        self.compute_ms.append((second - again) * 1e3)
        self.cpu_ms.append(tuple((a - b) * 1e3 for a, b in zip(after, before, strict=True)))

    def _cpu_s(self) -> tuple[float, ...]:
        return tuple(map(cpu_s, self.pids))


def cpu_s(pid: int) -> float:
    """Return the CPU time of all threads of a process, to the nanosecond."""
    return time.clock_gettime((~pid << 3) | _SCHEDULED)


async def start_version(stack: contextlib.AsyncExitStack, checkout: Path, options: argparse.Namespace) -> Version:
    """Start a node with the services of a checkout, and an executor with another model."""
    home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="thaw-av-")))
    models = [make_demo_model(home / "models" / f"m{seed}", options.size, seed) for seed in range(2)]
    os.environ["PYTHONPATH"] = str(checkout)
    stack.enter_context(contextlib.chdir(checkout))
    node = await stack.enter_async_context(node_of(home, options.threads))
    neighbour = await node.attach(await node.card(models[1], "shared"))
    await node.complete(neighbour.instance_id)
    pids = (*node.pids, *neighbour.pids)
    if any(Path(psutil.Process(pid).cwd()) != checkout for pid in pids):
        raise SystemExit(f"the services do not run in {checkout}")
    return Version(node, await node.card(models[0], "shared"), pids)


async def run(options: argparse.Namespace) -> dict[str, float]:
    async with contextlib.AsyncExitStack() as stack:
        checkouts = (options.before.resolve(), Path.cwd())
        versions = [await start_version(stack, checkout, options) for checkout in checkouts]
        for version in versions:
            await version.measure()  # brings the weights to the device
            for values in (version.ttft_ms, version.compute_ms, version.cpu_ms):
                values.clear()
        for number in range(options.rounds):
            for version in versions if number % 2 else versions[::-1]:
                await version.measure()
        figures = {k: v for name, version in zip(VERSIONS, versions, strict=True) for k, v in version.figures(name).items()}
    ratios = {
        f"after_to_before_{of}": figures[f"after_{of}_ms"] / figures[f"before_{of}_ms"] for of in ("ttft", "beyond_compute", "cpu")
    }
    return figures | ratios


def main() -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, required=True, help="a checkout of the version to compare with")
    parser.add_argument("--size", default="5m", choices=list(SIZES))
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    figures = asyncio.run(run(options))
    for name, value in figures.items():
        print(f"{name:32} {value:10.2f}")
    write(options.json, figures)


if __name__ == "__main__":
    main()
