"""Victims of ServerlessLLM and Shepherd*; the choice to load or to migrate."""

from __future__ import annotations

from itertools import product
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.scheduler.domain.policies.knapsack import EvictionCandidate, least_time
from services.scheduler.domain.policies.port import Clearance, MigrationTarget, Resident
from simulator.policies import serverlessllm, shepherd
from tests.unit.scheduler.policies.views import ask, device, option

FREE = {"a/0": 10, "b/0": 16}


@st.composite
def departures(draw: st.DrawFn) -> list[EvictionCandidate]:
    found = []
    for n in range(draw(st.integers(0, 5))):
        where = draw(st.lists(st.sampled_from(sorted(FREE)), max_size=2, unique=True))
        moves = tuple(MigrationTarget(d, float(draw(st.integers(0, 9))), FREE[d]) for d in where)
        unload = draw(st.sampled_from([None, None, 0.0, 3.0]))
        found.append(EvictionCandidate(f"v{n}", draw(st.integers(1, 12)), float(draw(st.integers(0, 3))), moves, unload))
    return found


def brute_force(victims: list[EvictionCandidate], short: int) -> float | None:
    """Return the least total time over every assignment."""
    best = None
    ways = [[None, *v.moves, *([v.unload_s] if v.unload_s is not None else [])] for v in victims]
    for assignment in product(*ways):
        used = dict.fromkeys(FREE, 0)
        freed, seconds = 0, 0.0
        for victim, way in zip(victims, assignment, strict=True):
            if way is None:
                continue
            freed += victim.nbytes
            if isinstance(way, MigrationTarget):
                used[way.device] += victim.nbytes
                seconds += way.total_s
            else:
                seconds += way
        if freed >= short and all(used[d] <= FREE[d] for d in FREE) and (best is None or seconds < best):
            best = seconds
    return best


@settings(deadline=None)
@given(victims=departures(), short=st.integers(1, 40))
def test_search_finds_the_same_optimum_as_every_assignment(victims: list[EvictionCandidate], short: int) -> None:
    found = least_time(victims, short)
    best = brute_force(victims, short)
    assert (found.seconds if found is not None else None) == best
    if found is not None:
        by_key = {v.key: v for v in victims}
        for d, free in FREE.items():
            assert sum(by_key[k].nbytes for k, to in found.moves if to == d) <= free


def resident(key: str, nbytes: int, state: str = "serving", **more: object) -> Resident:
    return Resident(key, model=key, nbytes=nbytes, state=state, **more)  # type: ignore[arg-type]  # the test's own keywords


def test_two_small_instances_migrate_if_that_is_faster_than_one_large() -> None:
    there = MigrationTarget("s2/0", 2.0, 100)
    view = device(
        "s1/0",
        resident("large", 20, moves=(MigrationTarget("s2/0", 5.0, 100),)),
        resident("small", 10, moves=(there,)),
        resident("little", 10, moves=(MigrationTarget("s3/0", 2.5, 100),)),
    )
    found = serverlessllm.clear(ask(), view, 20, 0.0)
    assert found == Clearance("migrate", ("little", "small"), 20, 2.5, 4.5, {"small": "s2/0", "little": "s3/0"})


def test_migrations_to_one_server_load_sequentially() -> None:
    view = device("s1/0", *(resident(k, 10, moves=(MigrationTarget(f"s2/{k}", 2.0, 10),)) for k in "ab"))
    found = serverlessllm.clear(ask(), view, 20, 0.0)
    assert found is not None
    assert found.delay_s == 4.0


def test_idle_instance_is_evicted_before_a_busy_one_migrates() -> None:
    view = device("s1/0", resident("idle", 10, "idle"), resident("busy", 10, moves=(MigrationTarget("s2/0", 1.0, 100),)))
    assert serverlessllm.clear(ask(), view, 10, 0.0) == Clearance("evict", ("idle",), 10)


def test_destination_receives_no_more_than_its_free_memory() -> None:
    view = device("s1/0", *(resident(k, 10, moves=(MigrationTarget("s2/0", 1.0, 15),)) for k in "ab"))
    assert serverlessllm.clear(ask(), view, 20, 0.0) is None
    assert serverlessllm.clear(ask(), view, 10, 0.0) is not None


def test_instance_without_destination_stays_and_a_single_destination_is_used() -> None:
    assert serverlessllm.clear(ask(), device("s1/0", resident("busy", 10)), 10, 0.0) is None
    view = device("s1/0", resident("busy", 10, moves=(MigrationTarget("s2/0", 3.0, 10),)))
    found = serverlessllm.clear(ask(), view, 10, 0.0)
    assert found == Clearance("migrate", ("busy",), 10, 3.0, 3.0, {"busy": "s2/0"})


def test_server_with_the_least_startup_time_is_chosen_even_after_a_migration() -> None:
    """The scheduler picks the server with the least start-up time, migration included.

    §5.1: model B is in DRAM of server 2, whose device serves A, and on the SSD of server 1, whose
    device is free.
    """
    from_ssd = option("s1/0", seconds=5.0)
    migrate = option("s2/0", seconds=1.5 + 0.8, clearance=Clearance("migrate", ("A",), 10, 1.5, 1.5, {"A": "s1/0"}))
    assert serverlessllm.choose(ask(), [from_ssd, migrate], "") == migrate
    slow = option("s2/0", seconds=6.0 + 0.8, clearance=migrate.clearance)
    assert serverlessllm.choose(ask(), [from_ssd, slow], "") == from_ssd
    assert serverlessllm.choose(ask(), [], "") is None


def test_shepherd_preempts_instances_that_serverlessllm_migrates() -> None:
    long, brief = (resident(k, 10, moves=(MigrationTarget("s2/0", t, 10),)) for k, t in (("long", 7.0), ("brief", 4.5)))
    assert shepherd.clear(ask(), device("s1/0", long, brief), 10, 0.0) == Clearance("preempt", ("brief",), 10, 0.0, 4.5)
    idle = device("s1/0", long, resident("idle", 10, "idle"))
    assert shepherd.clear(ask(), idle, 10, 0.0) == Clearance("evict", ("idle",), 10)
    assert shepherd.clear(ask(), device("s1/0", resident("stuck", 10)), 10, 0.0) is None


def test_sixteen_equally_slow_victims_with_three_destinations_have_a_plan() -> None:
    moves = tuple(MigrationTarget(f"s{d}/0", 1.0 + d, 120) for d in range(3))
    victims = [EvictionCandidate(f"v{n}", 10 + n, float(n), moves) for n in range(16)]
    found = least_time(victims, 200)
    assert found is not None
    assert found.freed >= 200


@pytest.mark.parametrize("seed", range(20))
def test_no_random_plan_for_sixteen_victims_beats_the_search(seed: int) -> None:
    random = Random(seed)
    free = {f"s{d}/0": random.randint(5_000, 20_000) for d in range(7)}
    victims = []
    for n in range(16):
        where = random.sample(sorted(free), 4)
        moves = tuple(MigrationTarget(d, random.uniform(0, 3), free[d]) for d in where)
        unload_s = random.uniform(0, 1) if random.random() < 0.3 else None
        victims.append(EvictionCandidate(f"v{n}", random.randint(300, 3_000), random.random(), moves, unload_s))
    short = sum(v.nbytes for v in victims) * random.randint(2, 8) // 10
    found = least_time(victims, short)
    assert found is not None
    plans = filter(None, (random_plan(random, victims, free, short) for _ in range(300)))
    assert min(plans) >= found.seconds


def random_plan(random: Random, victims: list[EvictionCandidate], free: dict[str, int], short: int) -> float | None:
    """Return the time of a plan that moves or unloads victims at random until enough is free."""
    left, seconds = dict(free), 0.0
    for victim in random.sample(victims, len(victims)):
        if short <= 0:
            return seconds
        fitting = [m for m in victim.moves if left[m.device] >= victim.nbytes]
        if victim.unload_s is not None:
            seconds += victim.unload_s
        elif fitting:
            move = random.choice(fitting)
            left[move.device] -= victim.nbytes
            seconds += move.total_s
        else:
            continue
        short -= victim.nbytes
    return seconds if short <= 0 else None
