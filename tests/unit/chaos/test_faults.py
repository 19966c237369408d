"""A campaign's plan is a function of its seed, and covers all kinds of faults."""

from __future__ import annotations

from bench.chaos.faults import VICTIMS, Strike, count, plan


def test_fault_plan_depends_only_on_the_seed() -> None:
    assert plan(100, 1) == plan(100, 1)
    assert plan(100, 1) != plan(100, 2)


def test_every_kind_is_struck_in_proportion() -> None:
    struck = count(plan(500, 1))
    assert sum(struck.values()) == 500
    rounds = 500 / sum(VICTIMS.values())
    assert all(abs(struck[victim] - rounds * share) <= share + 1 for victim, share in VICTIMS.items()), struck


def test_faults_are_kills_stops_and_pairs_of_different_kinds() -> None:
    faults = plan(500, 1)
    assert {f.kind for f in faults} == {"kill", "stop", "pair"}
    assert [f.number for f in faults] == list(range(1, len(faults) + 1))
    pairs = [f.strikes for f in faults if f.kind == "pair"]
    assert all(a.victim != b.victim and a.action == b.action == "kill" for a, b in pairs)


def test_strike_always_chooses_an_existing_victim() -> None:
    assert [Strike("engine", "kill", pick).choose(3) for pick in (0.0, 0.34, 0.67, 0.999999)] == [0, 1, 2, 2]
