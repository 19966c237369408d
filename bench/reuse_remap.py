"""Remapping beside Tangram's Algorithm 1 and merging (Fig. 10), for bench.reuse.

Remapping is measured: scattered pages are reserved for a load of 8 GiB, and mapped as one range.
The others are computed: the bytes that they move in a history of loads over one pool of contiguous
regions (simulator/policies/tangram_packing.py), and their time at this machine's measured bandwidth
of copies.
"""

from __future__ import annotations

import mmap
import os
import random
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from unittest.mock import patch

import numpy as np

from bench.papers import tangram_fig10 as fig10
from bench.papers.constants import tangram as c
from bench.report import median
from shared.mapping import map_descriptor
from weights.store import pages
from weights.store.memory import extents_of
from weights.store.pages import Store, complete, give_back, lend, release, reserve
from weights.store.units import PAGE_BYTES, Unit

GIB = 1 << 30
LAYER_PAGES = 64
"""A unit of 128 MiB, as a feed-forward matrix of a 13B model."""


def remap(nbytes: int, run_pages: int, rounds: int) -> dict[str, float]:
    """Return median milliseconds to reserve and to map `nbytes` in scattered runs of free pages.

    Args:
        run_pages: Neighbouring free pages: 1 is the worst case, `LAYER_PAGES` that of reclaimed
            units.
    """
    count = nbytes // PAGE_BYTES
    units = [Unit(f"u{n}", n * LAYER_PAGES * PAGE_BYTES, LAYER_PAGES * PAGE_BYTES) for n in range(count // LAYER_PAGES)]
    file = os.memfd_create("thaw-bench-remap")
    reserving, mapping = [], []
    try:
        os.ftruncate(file, 2 * nbytes)
        for seed in range(rounds):
            runs = [2 * n * run_pages for n in range(count // run_pages)]  # every other run is in use
            random.Random(seed).shuffle(runs)
            store = replace(Store.empty(2 * count), free=tuple(start + n for start in runs for n in reversed(range(run_pages))))
            began = time.perf_counter()
            found = reserve(store, "a", "m", units, 0.0, lambda _: 0.0)
            assert found is not None
            reserved = time.perf_counter()
            extents = extents_of([found.store.units[u.key] for u in units])
            listed = time.perf_counter()
            mapped: mmap.mmap = map_descriptor(file, extents)
            mapping.append((time.perf_counter() - listed) * 1e3)
            mapped.close()
            reserving.append((reserved - began) * 1e3)
    finally:
        os.close(file)
    return {"reserve_ms": median(reserving), "map_ms": median(mapping), "mappings": float(len(extents)), "moved_bytes": 0.0}


@dataclass(frozen=True)
class Churn:
    """A history of loads beside a KV cache.

    Attributes:
        pages: The pool.
        models: Models of 2 to 8 GiB that follow each other at random. Pairs share most units.
        kv_pages: The KV cache has fewer pages than this, at random before each load.
    """

    loads: int = 400
    pages: int = 20 * GIB // PAGE_BYTES
    models: int = 10
    kv_pages: int = 600

    def figures(self) -> dict[str, float]:
        return {name: float(value) for name, value in asdict(self).items()}


def churn(history: Churn, seed: int = 0, *, spares: bool = True) -> dict[str, float]:
    """Return the runs of pages for each 8 GiB of a load after many loads, and the mapping times.

    The KV cache borrows single pages and returns them in another order. The last tenth of the loads
    is measured; copied bytes are those of all loads.

    Args:
        spares: False: units also take the free pages that they would leave to KV caches.
    """
    with nullcontext() if spares else patch.object(pages, "spared_pages", lambda _: 0):
        return _churn(history, random.Random(seed))


def _churn(history: Churn, rng: random.Random) -> dict[str, float]:
    models = [_model(number, rng) for number in range(history.models)]
    store = Store.empty(history.pages)
    borrowed: list[int] = []
    extents, mapping, cpu, free, copied = [], [], [], [], 0
    file = os.memfd_create("thaw-bench-churn")
    try:
        os.ftruncate(file, history.pages * PAGE_BYTES)
        for number in range(history.loads):
            units = rng.choice(models)
            wanted = rng.randrange(history.kv_pages)
            if borrowed and (returned := rng.sample(borrowed, max(0, len(borrowed) - wanted))):
                store = give_back(store, "kv", returned)
            if (lent := lend(store, "kv", max(0, wanted - len(borrowed)), lambda u: u.used_at)) is not None:
                store = lent[0]
            borrowed = list(store.lent.get("kv", ()))
            found = reserve(store, "a", "m", units, float(number), lambda u: u.used_at)
            assert found is not None
            copied += sum(u.nbytes for u in found.missing)
            store, _ = release(complete(found.store, [u.key for u in found.missing]), "a", float(number))
            if number >= history.loads - history.loads // 10:
                runs = extents_of([store.units[u.key] for u in units])
                parts = 8 * GIB / sum(u.nbytes for u in units)
                began, cpu_began = time.perf_counter(), time.thread_time()
                mapped: mmap.mmap = map_descriptor(file, runs)
                mapping.append((time.perf_counter() - began) * 1e3 * parts)
                cpu.append((time.thread_time() - cpu_began) * 1e3 * parts)
                mapped.close()
                extents.append(len(runs) * parts)
                free.append(len(store.free))
    finally:
        os.close(file)
    return {
        "runs": sum(extents) / len(extents),
        "most_runs": max(extents),
        "map_ms": median(mapping),
        "map_cpu_ms": median(cpu),
        "most_map_ms": max(mapping),
        "free_pages": sum(free) / len(free),
        "copied_gb": copied / 1e9,
    }


def _model(number: int, rng: random.Random) -> list[Unit]:
    """Units of a model: matrices of 24 to 128 MiB, and small tensors in units of a page or two.

    A model of odd number has all but its last quarter from the one before it.
    """
    size = random.Random(number // 2).choice((2, 4, 6, 8)) * GIB
    units: list[Unit] = []
    at = 0
    while at < size:
        layer = len(units) // 4
        nbytes = (128, 48, 24, rng.choice((1, 2)) * 2)[len(units) % 4] << 20
        owner = number // 2 * 2 if at < 0.75 * size else number
        units.append(Unit(f"{owner}-{layer}-{len(units) % 4}", at, nbytes))
        at += nbytes
    return units


def copy_gb_per_s(nbytes: int = 256 << 20, rounds: int = 5) -> float:
    """Measure a copy in memory, in 10^9 bytes per second."""
    source, target = np.ones(nbytes, np.uint8), np.zeros(nbytes, np.uint8)
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        np.copyto(target, source)
        times.append(time.perf_counter() - began)
    return nbytes / median(times) / 1e9


def moving(count: int, seed: int = 0) -> dict[str, dict[str, float]]:
    """Return mean bytes moved by a load, and milliseconds to decide, by strategy."""
    found = {}
    for strategy in fig10.STRATEGIES:
        played = fig10.play(strategy, seed, count).values()
        requests = sum(p["requests"] for p in played)
        found[strategy[0]] = {
            "moved_bytes": sum(p["merge_s"] for p in played) * c.MERGE.value * 1e9 / requests,
            "compute_ms": sum(p["compute_ms"] for p in played) / requests,
        }
    return found
