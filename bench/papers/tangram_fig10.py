"""Tangram Fig. 10: savings of eviction by cost and of Partitioned-Gain Packing.

The scheduler's own packing functions run on tensors of the models' sizes, over the regions of one
pool; nothing else is simulated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from random import Random
from time import perf_counter

from bench.papers import tangram as t
from bench.papers.constants import tangram as c
from bench.papers.core import Options, Result, Row, estimate
from simulator.policies.tangram_packing import Packing, Region, evict, merge_all, pack, remove_evicted

NAME = "tangram-fig10"
LAYERS = {"gpt20B": 44, "opt13B": 40, "yi9B": 48, "llama8B": 32, "opt6.7B": 32, "llama3B": 28, "qwen3B": 36, "opt1.3B": 24}
"""Number of layers, from the models' published configurations."""
EMBEDDING = 0.05
"""Share of a model's bytes; the layers have the rest in equal parts."""
PARTS = (0.25, 0.08, 0.335, 0.335)
"""Shares of a layer: attention's input and output, and the two halves of the feed-forward part."""
MB_PER_GB = 1000
"""Sizes of tensors and regions are in MB."""
Strategy = tuple[str, bool, Callable[[list[Region], Mapping[str, int]], Packing | None]]
"""Name, whether eviction is by cost (else by chance), and the packing function."""
STRATEGIES: tuple[Strategy, ...] = (("Rand+GM", False, merge_all), ("MCE+GM", True, merge_all), ("MCE+PGP", True, pack))


def tensors(model: c.Model) -> dict[str, int]:
    """Return the tensors of a model with their sizes, in MB."""
    layer = (1 - EMBEDDING) * model.gb * MB_PER_GB / LAYERS[model.name]
    found = {f"{model.name}/embedding": round(EMBEDDING * model.gb * MB_PER_GB)}
    for n in range(LAYERS[model.name]):
        found.update({f"{model.name}/{n}.{p}": max(1, round(layer * part)) for p, part in enumerate(PARTS)})
    return found


def lay_out(regions: list[Region], packing: Packing, new: Mapping[str, int], costs: Mapping[str, float]) -> list[Region]:
    """Return the regions of the pool after the packing's moves, with the new tensors placed.

    Args:
        costs: Seconds to load a MB of each model again, times its likelihood (Eq. 2).
    """
    offset, at = 0, []
    for r in regions:
        if r.key:
            at.append((packing.moves.get(r.key, offset), r.size, r.key))
        offset += r.size
    at += [(place, new[key], key) for key, place in packing.places.items()]
    chain, end = [], 0
    for place, size, key in sorted(at):
        if place > end:
            chain.append(Region(place - end))
        chain.append(Region(size, key, cost=costs[key.split("/")[0]] * size))
        end = place + size
    return [*chain, Region(offset - end)] if offset > end else chain


def play(strategy: Strategy, seed: int, count: int, level: str = "L3") -> dict[str, dict[str, float]]:
    """Serve a sequence of requests, one after another, from one pool.

    Returns:
        By model: its requests, and their sums of seconds of loading and merging, and of
        milliseconds of computing the decisions.
    """
    _, by_cost, pack_by = strategy
    random = Random(f"evict {seed}")
    models = {m.name: m for m in c.MODELS}
    sizes = {m.name: tensors(m) for m in c.MODELS}
    chain = [Region(round(c.DEVICE_GB.value * MB_PER_GB))]
    asked = dict.fromkeys(models, 1)
    found = {m: {"requests": 0.0, "load_s": 0.0, "merge_s": 0.0, "compute_ms": 0.0} for m in models}
    for request in t.sequence(list(models), level, count, 1.0, seed):
        name, mine = request.model, found[request.model]
        asked[name] += 1
        costs = {m: n / sum(asked.values()) / c.PCIE.value / MB_PER_GB for m, n in asked.items()}
        here = {r.key for r in chain if r.key}
        missing = {k: size for k, size in sizes[name].items() if k not in here}
        active = [
            Region(r.size, r.key, r.key.startswith(f"{name}/"), costs[r.key.split("/")[0]] * r.size) if r.key else r for r in chain
        ]
        began = perf_counter()
        freed = evict(active, sum(missing.values())) if by_cost else evict_any(active, sum(missing.values()), random)
        packing = pack_by(freed, missing) if freed is not None else None
        # The model's own tensors do not move: if the new ones do not fit between them, evict more.
        while packing is None and any(r.movable for r in freed or active):
            freed = remove_evicted(
                freed or active, {next(r.key for r in sorted(freed or active, key=lambda r: r.cost) if r.movable)}
            )
            packing = pack_by(freed, missing)
        took = perf_counter() - began
        assert packing is not None
        assert freed is not None
        chain = lay_out(freed, packing, missing, costs)
        mine["requests"] += 1
        mine["load_s"] += sum(missing.values()) / MB_PER_GB / c.PCIE.value
        mine["merge_s"] += packing.moved / MB_PER_GB / c.MERGE.value
        mine["compute_ms"] += 1e3 * took
    return found


def evict_any(regions: list[Region], need: int, random: Random) -> list[Region] | None:
    """Evict tensors in random order until `need` MB are free; None: too few can be freed."""
    drawn = [r.key for r in regions if r.movable]
    random.shuffle(drawn)
    short = need - sum(r.size for r in regions if not r.key)
    sizes = {r.key: r.size for r in regions}
    evicted: set[str] = set()
    while short > 0 and drawn:
        evicted.add(drawn.pop())
        short = need - sum(r.size for r in regions if not r.key) - sum(sizes[k] for k in evicted)
    return remove_evicted(regions, evicted) if short <= 0 else None


def run(options: Options) -> Result:
    result = Result(NAME, "loading policies over one pool of 45 GB (seconds a request)")
    count = max(30, round(400 * options.scale))
    played = {s[0]: [play(s, seed, count) for seed in range(options.seeds)] for s in STRATEGIES}
    for name, runs in played.items():
        for model in ("gpt20B", "opt1.3B", "all"):
            rows = []
            for run_ in runs:
                picked = list(run_.values()) if model == "all" else [run_[model]]
                requests = sum(p["requests"] for p in picked) or 1.0
                rows.append({k: sum(p[k] for p in picked) / requests for k in ("load_s", "merge_s", "compute_ms")})
            result.rows.append(Row({"strategy": name, "model": model}, rows))
    packing, merging, drawn = (result.row(strategy=s, model="all") for s in ("MCE+PGP", "MCE+GM", "Rand+GM"))
    off = estimate(1 - a["merge_s"] / b["merge_s"] for a, b in zip(packing.runs, merging.runs, strict=True))
    result.share("5.4.1, Fig. 10", "share of merging that packing saves", off, 0.93)
    less = merging.divide_by(drawn, "load_s")
    result.claim_below("5.4.1, Fig. 10", "eviction by cost loads less than eviction by chance (ratio)", less)
    whole = sum(m.gb for m in c.MODELS) / len(c.MODELS) / c.PCIE.value
    result.notes.append(f"Without reuse a request loads {whole:.2f} s on average over the eight models.")
    result.notes.append("compute_ms is of Python on whatever machine this ran on; the paper's is below 1 ms in C++.")
    return result
