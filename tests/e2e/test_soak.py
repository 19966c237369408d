"""A short `bench.soak`: a mesh at rest after rounds of mixed load has not grown."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from bench.soak import STEADY, load_of, start_mesh
from bench.soak_census import SWAPPED, Census, Counter
from bench.soak_load import ADAPTER, AGAIN, CANCELLED, KEYED, MALFORMED, STREAMED, SWAP, WHOLE, SentRequest
from shared.contracts.node import InstanceState
from tests.support.launcher import Thaw

_RATE = 6.0
_DECK = (SWAP, STREAMED, KEYED, SWAP, CANCELLED, ADAPTER, SWAP, WHOLE, MALFORMED, AGAIN)
_WARM_UP, _ROUND = 2 * len(_DECK), 4 * len(_DECK)
_MOST_ROUNDS = 5
_PLANS = "table public.plans|rows"
_AT_REST_WITHIN_S = 60.0
_ENDED = (InstanceState.STOPPED, InstanceState.FAILED)
_STORES = ("/dev/shm|files", "/dev/shm|bytes", "postgres|connections")
"""Metrics beside descriptors and threads.

Postgres's own descriptors are left out: each backend keeps its files open.
"""
_SLACK = {"connections": 3.0, "fds": 3.0, "threads": 4.0, "files": 0.0, "bytes": 0.0}
"""Allowed growth: pools of threads and connections fill up with use.

The rounds have more swaps, so a leak of one a swap is found.
"""


@pytest.fixture(scope="module")
def mesh() -> Iterator[Thaw]:
    mesh = start_mesh("off", THAW_DRAM_BYTES="0")  # weights that no instance holds would count as growth
    try:
        yield mesh
    finally:
        mesh.close()


def grown(before: Census, after: Census) -> dict[str, tuple[float, float]]:
    """Return the metrics that grew beyond their slack.

    Engines of swapped models vary; the scheduler's state gives their maximum.
    """
    return {
        key: (before[key], after[key])
        for key in before.keys() & after.keys()
        for name, _, metric in [key.partition("|")]
        if (metric in ("fds", "threads") and name not in (SWAPPED, "mesh", "postgres")) or key in _STORES
        if after[key] > before[key] + _SLACK[metric]
    }


async def _ask(mesh: Thaw, requests: int) -> list[SentRequest]:
    answered: list[SentRequest] = []
    load = load_of(mesh, _RATE, answered.append, _DECK)
    try:
        await load.run(requests=requests)
    finally:
        await load.close()
    return answered


async def _at_rest(mesh: Thaw, counter: Counter, before: Census | None = None) -> tuple[Census, list[str]]:
    """Wait for a census at rest: every engine has its instance, nothing has grown.

    Returns:
        The last census, with its faults.
    """
    deadline = asyncio.get_running_loop().time() + _AT_REST_WITHIN_S
    while True:
        census, faults = await counter.count(), _faults(mesh, counter)
        if census["mesh|zombies"]:
            faults.append(f"{census['mesh|zombies']:.0f} zombies")
        faults += [f"{key}: {was:.0f}, now {now:.0f}" for key, (was, now) in grown(before or census, census).items()]
        if not faults or asyncio.get_running_loop().time() > deadline:
            return census, faults
        await asyncio.sleep(0.5)


def _faults(mesh: Thaw, counter: Counter) -> list[str]:
    instances = [i for n in mesh.json("ps")["nodes"] for i in n["instances"] if i["state"] not in _ENDED]
    pids = {pid for i in instances for pid in i["pids"]}
    faults = [f"{i['model']} is {i['state']}" for i in instances if InstanceState(i["state"]).starting]
    groups = [g.name for g in counter.groups() if not any(g.name.endswith(i["instance_id"]) for i in instances)]
    engines = {pid for pid in counter.engines() if pid not in pids}
    return faults + [f"control group {g} is no instance's" for g in groups] + [f"engine {p} is no instance's" for p in engines]


async def test_resources_do_not_grow_over_rounds_of_mixed_load(mesh: Thaw) -> None:
    counter = Counter(mesh, (STEADY,))
    try:
        first = await _ask(mesh, _WARM_UP)
        before, faults = await _at_rest(mesh, counter)
        assert faults == [], "\n".join(faults)
        then: list[SentRequest] = []
        swaps, rounds = 0.0, 0
        # On a slow machine more requests share a swap.
        while swaps <= max(_SLACK.values()) and rounds < _MOST_ROUNDS:
            then += await _ask(mesh, _ROUND)
            after, faults = await _at_rest(mesh, counter, before)
            swaps, rounds = after[_PLANS] - before[_PLANS], rounds + 1
    finally:
        await counter.close()
    assert [a for a in (*first, *then) if a.lost] == []
    assert (len(first), len(then)) == (_WARM_UP, rounds * _ROUND)
    assert swaps > max(_SLACK.values()), "too few swaps to detect a leak"
    assert sum(a.kind == SWAP for a in then) >= swaps
    assert faults == [], "\n".join(faults)


def test_a_descriptor_for_each_swap_is_growth() -> None:
    before = {"gateway|fds": 20.0, "gateway|threads": 5.0, "/dev/shm|bytes": 4096.0, "mesh|fds": 100.0}
    assert grown(before, before | {"gateway|fds": 23.0, "mesh|fds": 200.0}) == {}
    assert grown(before, before | {"gateway|fds": 24.0}) == {"gateway|fds": (20.0, 24.0)}
    assert grown(before, before | {"/dev/shm|bytes": 8192.0}) == {"/dev/shm|bytes": (4096.0, 8192.0)}
