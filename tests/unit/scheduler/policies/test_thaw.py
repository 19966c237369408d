"""Thaw's own policy: the least total time."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.domain.cost.cost import Cost
from services.scheduler.domain.policies.port import Ask, Clearance, Demand, DeviceView, MigrationTarget, Option, Resident, Usage
from services.scheduler.domain.policies.thaw import LEAD_S, STARVING_S, choose, clear, order, scale

ASK = Ask("new", 10, 1.0)


def device(*residents: Resident, key: str = "n/0", failed: bool = False) -> DeviceView:
    return DeviceView(key, key.partition("/")[0], 100, 0, 0, residents, has_failed=failed)


def idle(key: str, nbytes: int, miss: float = 0.5, reload_s: float = 1.0) -> Resident:
    return Resident(key, key, nbytes, "idle", miss_probability=miss, reload_s=reload_s)


def option(key: str, total: float, penalty: float = 0.0, how: str = "none", *, failed: bool = False) -> Option:
    clearance = Clearance(how, penalty_s=penalty)  # type: ignore[arg-type]  # one of the literals
    return Option((device(key=key, failed=failed),), "load", Cost(total), clearance)


def test_least_likely_used_instance_is_evicted() -> None:
    found = clear(ASK, device(idle("hot", 10, miss=0.9), idle("cold", 10, miss=0.1)), 10, 0.0)
    assert found is not None
    assert (found.how, found.victims, found.penalty_s) == ("evict", ("cold",), 0.1)


@given(st.lists(st.tuples(st.integers(1, 9), st.floats(0, 1), st.floats(0, 9)), max_size=6), st.integers(1, 30))
def test_eviction_frees_enough_and_has_no_superfluous_victim(sizes: list[tuple[int, float, float]], short: int) -> None:
    there = [idle(f"r{n}", size, miss, again) for n, (size, miss, again) in enumerate(sizes)]
    found = clear(ASK, device(*there), short, 0.0)
    assert (found is None) == (sum(r.nbytes for r in there) < short)
    if found is not None:
        freed = [r.nbytes for r in there if r.key in found.victims]
        assert sum(freed) == found.freed_bytes >= short
        assert all(found.freed_bytes - size < short for size in freed)


def test_serving_instance_migrates_rather_than_being_preempted() -> None:
    serving = Resident(
        "a", "a", 10, "serving", active=1, resume_s=0.5, moves=(MigrationTarget("n/1", 0.5, 10),), remaining_s=60, reload_s=1
    )
    found = clear(ASK, device(serving), 10, 0.0)
    assert found is not None
    assert (found.how, found.moves, found.delay_s) == ("migrate", {"a": "n/1"}, 0.5)


def test_instance_that_finishes_before_it_could_restart_is_not_preempted() -> None:
    nearly = Resident("a", "a", 10, "serving", active=1, resume_s=1.0, remaining_s=0.5, reload_s=5)
    assert clear(ASK, device(nearly), 10, 0.0) is None


def test_preemption_costs_the_whole_restart_and_not_only_the_load_of_its_bytes() -> None:
    """Its request ends after 5 s; preempted, it would wait 8 s for a start, 1 s of it a load."""
    serving = Resident("a", "a", 10, "serving", active=1, remaining_s=5.0, reload_s=1.0, delay_s=8.0)
    assert clear(Ask("new", 10, 1.0, priority=1), device(serving), 10, 0.0) is None
    found = clear(Ask("new", 10, 1.0, priority=1), device(replace(serving, remaining_s=9.0)), 10, 0.0)
    assert found is not None
    assert (found.how, found.penalty_s) == ("preempt", 8.0)


def test_choice_minimizes_own_time_plus_the_loss_of_others() -> None:
    options = [option("a/0", 5.0), option("b/0", 1.0, penalty=3.0, how="evict"), option("c/0", 1.0, penalty=9.0, how="evict")]
    assert choose(ASK, options, "") is options[1]
    crowd = Ask("new", 10, 1.0, requests=9)
    assert choose(crowd, [options[0], options[2]], "") is options[2], "many wait: what one other loses counts less"


def test_a_device_of_a_recent_failure_is_avoided_and_preemption_is_the_last_resort() -> None:
    failed, interrupts, slow = option("a/0", 1.0, failed=True), option("b/0", 1.0, how="preempt"), option("c/0", 50.0)
    assert choose(ASK, [failed, interrupts, slow], "") is slow
    assert choose(ASK, [failed, interrupts], "") is interrupts
    assert choose(ASK, [], "") is None


def test_replica_target_covers_waiting_and_running_requests() -> None:
    assert scale(Demand("a", waiting=1, running=0, live=0, capacity=4)) == 1
    assert scale(Demand("a", waiting=3, running=8, live=2, capacity=4, max_replicas=8)) == 3
    assert scale(Demand("a", waiting=0, running=8, live=2, capacity=4, max_replicas=8)) == 2


def test_eviction_cost_is_the_delay_of_a_restart_and_not_its_load_time() -> None:
    """The delay that an eviction causes counts, not the load time.

    A light model's load overlaps its execution: it is as fast after an eviction (Torpor §4.3).
    """
    light = Resident("light", "light", 10, "idle", miss_probability=0.9, reload_s=5.0, delay_s=0.0)
    found = clear(ASK, device(idle("heavy", 10, miss=0.1), light), 10, 0.0)
    assert found is not None
    assert (found.victims, found.penalty_s) == (("light",), 0.0)


def test_instance_near_its_keep_alive_is_evicted_first() -> None:
    ending = Resident("ending", "ending", 10, "idle", miss_probability=0.9, reuse_probability=0.01, reload_s=1.0)
    found = clear(ASK, device(idle("stays", 10, miss=0.5), ending), 10, 0.0)
    assert found is not None
    assert found.victims == ("ending",)


def test_equal_priority_is_preempted_only_for_a_shorter_request() -> None:
    serving = Resident("a", "a", 10, "serving", active=1, resume_s=0.5, remaining_s=10, reload_s=1)
    assert clear(Ask("new", 10, 1.0, exec_s=30), device(serving), 10, 0.0) is None
    found = clear(Ask("new", 10, 1.0, exec_s=3), device(serving), 10, 0.0)
    assert found is not None
    assert found.how == "preempt"
    higher = clear(Ask("new", 10, 1.0, exec_s=30, priority=1), device(serving), 10, 0.0)
    assert higher is not None


def test_feasible_objectives_precede_others_earliest_deadline_first() -> None:
    late, soon, has_time, none = (
        Ask("late", 10, 9.0, slo_ttft_s=5.0),
        Ask("soon", 10, 4.0, slo_ttft_s=5.0),
        Ask("has-time", 10, 4.5, slo_ttft_s=50.0),
        Ask("none", 10, 9.5),
    )
    assert [a.model for a in order([late, none, has_time, soon], {}, 0.5)] == ["soon", "has-time", "none", "late"]
    far = {"soon": Usage("soon", 100, 0), "has-time": Usage("has-time", 100, 100)}
    assert order([soon, has_time], far, 0.5)[0] is has_time, (
        "a function that is far from complying is placed after one that complies"
    )


def test_start_that_meets_the_objective_is_chosen_before_cheaper_ones_that_miss_it() -> None:
    late, in_time = option("a/0", 3.0), option("b/0", 1.0, penalty=30.0, how="evict")
    assert choose(Ask("new", 10, 0.0, slo_ttft_s=2.0), [late, in_time], "") is in_time
    assert choose(Ask("new", 10, 0.0, slo_ttft_s=5.0), [late, in_time], "") is late, "both are in time"


def test_busy_neighbours_delay_an_instance_by_turns_whatever_their_memory() -> None:
    small, large = (Resident("r", "r", size, "serving", active=1, remaining_s=0.1) for size in (1, 70))
    away = Option((device(key="b/0"),), "load", Cost(1.5))
    for neighbour in (small, large):
        beside = Option((device(neighbour, key="a/0"),), "load", Cost(1.0))
        assert choose(Ask("new", 10, 0.0, exec_s=0.6), [beside, away], "") is away, "its first token takes 0.6 s longer"
        assert choose(Ask("new", 10, 0.0, exec_s=0.1), [beside, away], "") is beside


def test_neighbours_are_delayed_by_no_more_than_the_new_instance_computes() -> None:
    long = Resident("long", "long", 70, "serving", active=1, remaining_s=60.0)
    beside = Option((device(long, key="a/0"),), "load", Cost(1.0))
    away = Option((device(key="b/0"),), "load", Cost(2.0))
    assert choose(Ask("new", 10, 0.0, exec_s=0.1), [beside, away], "") is beside, "0.1 s for each of both"
    assert choose(Ask("new", 10, 0.0, exec_s=0.1, requests=30), [beside, away], "") is away, "30 requests wait 0.1 s each for turns"


def test_delay_of_a_busy_neighbour_counts_for_each_of_its_requests() -> None:
    """Its turns delay all that run and wait there by 0.1 s each."""
    few, many = (Resident("r", "r", 70, "serving", active=2, queued=n, remaining_s=60.0) for n in (3, 18))
    away = Option((device(key="b/0"),), "load", Cost(2.0))
    for neighbour, chosen_key in ((few, "a/0"), (many, "b/0")):
        beside = Option((device(neighbour, key="a/0"),), "load", Cost(1.0))
        found = choose(Ask("new", 10, 0.0, exec_s=0.1), [beside, away], "")
        assert found is not None
        assert found.key == (chosen_key,)


def test_popular_model_is_kept_although_another_is_as_certain_to_be_used() -> None:
    """Evicting either delays one request by 10 s; 20 more of the popular one arrive then."""
    rare = Resident("rare", "rare", 10, "idle", last_used=1.0, miss_probability=1.0, reload_s=10.0, requests_per_s=0.02)
    popular = Resident("popular", "popular", 10, "idle", last_used=0.0, miss_probability=1.0, reload_s=10.0, requests_per_s=2.0)
    found = clear(ASK, device(popular, rare), 10, 0.0)
    assert found is not None
    assert (found.victims, found.penalty_s) == (("rare",), 10.0 * (1 + 0.02 * 10 / 2))


def ordered(*asks: Ask) -> list[str]:
    return [a.model for a in order(asks, {}, 1.0)]


def test_key_that_has_received_less_goes_first_and_of_one_key_the_longest_wait() -> None:
    asks = [Ask("a", 1, 9.0, share_s=5.0), Ask("b", 1, 1.0, share_s=4.0), Ask("c", 1, 2.0, share_s=4.0)]
    assert ordered(*asks) == ["c", "b", "a"]


def test_objective_goes_before_shares_up_to_the_lead() -> None:
    near, far = (Ask("urgent", 1, 0.0, slo_ttft_s=5.0, share_s=share) for share in (LEAD_S, LEAD_S + 1))
    fair = Ask("fair", 1, 9.0)
    assert ordered(fair, near) == ["urgent", "fair"]
    assert ordered(fair, far) == ["fair", "urgent"]


def test_priority_of_the_model_then_of_its_requests_goes_before_shares() -> None:
    asks = [
        Ask("fair", 1, 9.0),
        Ask("asks", 1, 0.0, request_priority=1, share_s=99.0),
        Ask("model", 1, 0.0, priority=1, share_s=99.0),
    ]
    assert ordered(*asks) == ["model", "asks", "fair"]


def test_objective_that_no_start_meets_has_no_precedence() -> None:
    """A start takes 23 s, the objective is 5 s: it is missed however soon the model is placed."""
    hopeless = Ask("hopeless", 1, 1.0, slo_ttft_s=5.0, start_s=23.0)
    possible = Ask("possible", 1, 1.0, slo_ttft_s=30.0, start_s=23.0)
    assert ordered(hopeless, possible, Ask("fair", 1, 2.0)) == ["possible", "fair", "hopeless"]


def test_late_models_with_the_most_requests_times_wait_go_first() -> None:
    many, few = Ask("many", 1, 4.0, requests=6), Ask("few", 1, 9.0, requests=2)
    assert ordered(few, many) == ["many", "few"], "one start serves all six"
    assert ordered(Ask("few", 1, 13.0, requests=2), many) == ["few", "many"], "who waits long enough is not overtaken for ever"


def test_starving_model_goes_before_objectives_of_its_priority() -> None:
    starving = Ask("starving", 1, STARVING_S, slo_ttft_s=5.0)
    urgent = Ask("urgent", 1, 0.0, slo_ttft_s=5.0)
    assert ordered(urgent, starving) == ["starving", "urgent"]
    assert ordered(Ask("high", 1, 0.0, slo_ttft_s=5.0, priority=1), starving) == ["high", "starving"]
