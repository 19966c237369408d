"""Which units to reclaim: the store's own decisions, replayed without copies, over many seeds.

    python -m bench.reuse_replay [--seeds N] [--requests N] [--pool GB] [--json PATH]

Sequences of requests load models onto one device through `weights.store.pages`, with sizes of
Tangram's Table 1 divided by 200. Only bytes are counted: with a paced link they determine the time.

    L1 to L4    Tangram's localities: the same model again, or any other with equal probability
    zipf        every request draws its model by popularity (Zipf, exponent 1)
    shifting    the same, and the order of popularity changes after each tenth of the requests

    random      any unit
    lru         the unit that was used least recently
    counts      bytes x tier x how often the model was loaded so far (as bench.reuse reports)
    thaw        bytes x tier x the scheduler's likelihood of a request within two minutes

Printed is, for each, the bytes of whole models over the bytes that were copied, as mean over the
seeds, and against `lru` as the mean difference in percent with its 95 % interval (paired by seed).
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from random import Random
from statistics import fmean, stdev

from bench.papers import tangram as t
from bench.papers.constants import tangram as c
from bench.papers.tangram_fig12 import pool as grown_pool
from bench.report import write
from services.scheduler.domain.prewarm.prefetch import likelihood
from services.scheduler.domain.state.usage_history import UsageHistory
from weights.store.cost import expected_loads, reload_cost
from weights.store.pages import Cost, Store, complete, release, reserve
from weights.store.units import PAGE_BYTES, Unit

SCALE = 200.0
POLICIES = ("random", "lru", "counts", "thaw")
WORKLOADS = (*c.CV, "zipf", "shifting")
Requests = Sequence[tuple[float, str]]
"""Seconds and model of each request."""


class Replay:
    """One device, and what the reclaiming policy knows of the requests so far."""

    def __init__(self, models: dict[str, list[Unit]], policy: str, seed: int) -> None:
        self._models, self._policy, self._random = models, policy, Random(seed)
        self._store = Store.empty(round(c.DEVICE_GB.value * 1e9 / SCALE / PAGE_BYTES))
        self._counts: Counter[str] = Counter()
        self._usage: dict[str, UsageHistory] = {}

    def request(self, at: float, name: str) -> int:
        """Load the model and release it; return the pages that were copied."""
        self._counts[name] += 1
        before = self._usage.get(name)
        self._usage[name] = before.used_at(at) if before is not None else UsageHistory(name, at)
        found = reserve(self._store, "a", name, self._models[name], at, self._cost(at))
        assert found is not None
        self._store, _ = release(complete(found.store, [u.key for u in found.missing]), "a", at)
        return sum(u.pages for u in found.missing)

    def _cost(self, now: float) -> Cost:
        match self._policy:
            case "random":
                return lambda _: self._random.random()
            case "lru":
                return lambda unit: unit.used_at
            case "counts":
                expected = {m: n / self._counts.total() for m, n in self._counts.items()}
            case _:
                expected = {m: likelihood(u, now) for m, u in self._usage.items()}
        return reload_cost(lambda _: "dram", expected_loads(expected, lambda _: ()))


def requests_of(workload: str, names: Sequence[str], count: int, seed: int) -> Requests:
    """Return the requests of a workload, with the paper's gaps."""
    gap = c.GAP_S.value
    if workload in c.CV:
        return [(r.at, r.model) for r in t.sequence(names, workload, count, gap, seed, gap)]
    random = Random(f"{workload} {seed}")
    weights = [1 / rank for rank in range(1, len(names) + 1)]
    order, at, found = random.sample(names, len(names)), 0.0, []
    for number in range(count):
        if workload == "shifting" and number % max(1, count // 10) == 0:
            order = random.sample(names, len(names))
        at += random.expovariate(1 / (2 * gap))
        found.append((at, random.choices(order, weights)[0]))
    return found


def play(workload: str, policy: str, models: dict[str, list[Unit]], count: int, seed: int) -> float:
    """Return the bytes of whole models over those that were copied; the first tenth warms up."""
    replay, whole, copied = Replay(models, policy, seed), 0, 0
    for number, (at, name) in enumerate(requests_of(workload, list(models), count, seed)):
        pages = replay.request(at, name)
        if number >= count // 10:
            whole, copied = whole + len(models[name]), copied + pages
    return whole / max(1, copied)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--pool", type=float, default=120.0, metavar="GB", help="size of all models together, before scaling")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    chosen = grown_pool(options.pool)
    sizes = {n: max(1, round(m.gb * 1e9 / SCALE / PAGE_BYTES)) for n, m in zip(t.name_copies(chosen), chosen, strict=True)}
    models = {n: [Unit(f"{n}/{i}", i * PAGE_BYTES, PAGE_BYTES) for i in range(pages)] for n, pages in sizes.items()}
    figures: dict[str, float] = {}
    for workload in WORKLOADS:
        by_policy = {p: [play(workload, p, models, options.requests, seed) for seed in range(options.seeds)] for p in POLICIES}
        for policy in POLICIES:
            gain = [100 * (a / b - 1) for a, b in zip(by_policy[policy], by_policy["lru"], strict=True)]
            half = 1.96 * stdev(gain) / len(gain) ** 0.5 if len(gain) > 1 else 0.0
            figures |= {f"{workload}_{policy}": fmean(by_policy[policy]), f"{workload}_{policy}_gain": fmean(gain)}
            print(
                f"{workload:8} {policy:7} {fmean(by_policy[policy]):6.2f} x   {fmean(gain):+6.1f} % against lru (± {half:.1f})",
                flush=True,
            )
    write(options.json, figures)


if __name__ == "__main__":
    main()
