"""bench.reuse_replay: what the ways to reclaim differ in."""

from __future__ import annotations

from bench.reuse_replay import play, requests_of
from weights.store.units import PAGE_BYTES, Unit

MODELS = {f"m{n}": [Unit(f"m{n}/{i}", i * PAGE_BYTES, PAGE_BYTES) for i in range(20)] for n in range(12)}


def test_a_workload_is_a_function_of_its_seed() -> None:
    names = list(MODELS)
    assert requests_of("zipf", names, 50, 1) == requests_of("zipf", names, 50, 1) != requests_of("zipf", names, 50, 2)


def test_expected_cost_is_ahead_where_popularity_differs_and_not_in_tangrams_localities() -> None:
    ahead = [play("zipf", "counts", MODELS, 200, seed) / play("zipf", "lru", MODELS, 200, seed) for seed in range(3)]
    assert min(ahead) > 1.0
    equal = [play("L1", "counts", MODELS, 200, seed) / play("L1", "lru", MODELS, 200, seed) for seed in range(3)]
    assert abs(sum(equal) / 3 - 1) < 0.1
