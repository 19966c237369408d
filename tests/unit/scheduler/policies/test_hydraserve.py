"""HydraServe's equations, Algorithm 1 and autoscaler.

Eq. 1 to 5 are computed by hand, Algorithm 1 by exhaustive search.
"""

from __future__ import annotations

from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.scheduler.domain.policies.autoscaling import groups, needed_workers, scale, share_requests
from services.scheduler.domain.policies.pipelines import Server, Times, allocate, schemes, tpot, ttft_in_turn, ttft_overlapped
from services.scheduler.domain.policies.port import Demand
from services.scheduler.domain.values import replace
from simulator.policies import hydraserve
from simulator.policies.hydraserve_ledger import Ledger, accepts, record_begin, record_end, settle, share
from tests.unit.scheduler.policies.views import ask, option

GB = 10**9
TIMES = Times(prefill=1.5, decode=0.042, hop=0.002, runtime=8.0, container=3.0, context=1.0, library=4.0)


def server(n: int, free: float = 22.0, network: float = 2.0, pcie: float = 10.0, sharing: int = 0) -> Server:
    return Server(f"s{n}/g0", f"s{n}", int(free * GB), network * GB, pcie * GB, sharing)


def test_equation_1_by_hand() -> None:
    """Equation 1 equals the values computed by hand.

    12 GB over 4 servers of 2 GB/s and 10 GB/s: 3 · (1/2 + 1/10) = 1.8 s; prefill 1.5 · (4 - 1 +
    1/4) = 4.875 s; 4 hops.
    """
    four = [server(n) for n in range(4)]
    assert ttft_in_turn(12 * GB, 4, 1, four, TIMES) == pytest.approx(8.0 + 1.8 + 4.875 + 0.008)
    assert ttft_in_turn(12 * GB, 1, 1, four[:1], TIMES) == pytest.approx(8.0 + 7.2 + 1.5 + 0.002)


def test_equation_2_by_hand() -> None:
    assert tpot(4, 1, TIMES) == pytest.approx(0.042 * 3.25 + 0.008)
    assert tpot(1, 1, TIMES) == pytest.approx(0.042 + 0.002)


def test_equation_5_by_hand() -> None:
    """Equation 5 equals the values computed by hand.

    Fetching 12 GB takes 6 s, less than container, context and libraries (8 s); at 1 GB/s it takes
    12 s and hides them.
    """
    assert ttft_overlapped(12 * GB, 1, 1, [server(0)], TIMES) == pytest.approx(8.0 + 1.5 + 0.002)
    assert ttft_overlapped(12 * GB, 1, 1, [server(0, network=1.0)], TIMES) == pytest.approx(12.0 + 1.5 + 0.002)
    assert ttft_overlapped(12 * GB, 2, 2, [server(0), server(1, pcie=1.0)], TIMES) == pytest.approx(4.0 + 6.0 + 1.5 + 0.004)


def test_full_workers_use_the_fastest_servers_that_hold_the_whole_model() -> None:
    servers = [server(0, free=22, network=1.0), server(1, free=8, network=4.0), server(2, free=22, network=2.0)]
    found = {(x.stages, x.full): [s.key for s in x.servers] for x in schemes(12 * GB, 17 * GB, servers, TIMES)}
    assert found[1, 1] == ["s2/g0"]
    assert found[2, 1] == ["s2/g0", "s0/g0"]  # s1 has no room for half of it
    assert (3, 0) in found
    assert found[3, 1] == ["s2/g0", "s1/g0", "s0/g0"]
    assert (2, 2) in found
    assert (3, 3) not in found


def test_scheme_with_least_sharing_is_chosen_among_those_within_objectives() -> None:
    shared = [server(n, sharing=1) for n in range(4)]
    free = server(9)
    found = allocate(12 * GB, 17 * GB, [*shared, free], TIMES, slo_ttft=60, slo_tpot=1)
    assert found is not None
    assert (found.stages, found.servers) == (1, (free,))


def test_tight_objective_takes_more_stages_and_an_infeasible_one_takes_one() -> None:
    servers = [server(n, network=0.5) for n in range(4)]  # 24 s for the whole of it
    found = allocate(12 * GB, 17 * GB, servers, TIMES, slo_ttft=20, slo_tpot=0.2)
    assert found is not None
    assert found.stages > 1
    assert found.ttft <= 20
    none = allocate(12 * GB, 17 * GB, servers, TIMES, slo_ttft=1, slo_tpot=0.2)
    assert none is not None
    assert (none.stages, none.full) == (1, 1)
    assert allocate(12 * GB, 17 * GB, [server(0, free=1)], TIMES, 60, 1) is None


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(3, 30), st.integers(1, 4), st.integers(2, 10)), min_size=1, max_size=5),
    st.booleans(),
)
def test_no_other_choice_of_servers_is_quicker_with_the_same_workers(servers: list[tuple[int, int, int]], overlapped: bool) -> None:
    """No other choice of servers is faster with the same workers.

    With links of one kind the algorithm's servers are the best ones for each (s, w).
    """
    made = [server(n, free, b, 10.0) for n, (free, b, _) in enumerate(servers)]
    formula = ttft_overlapped if overlapped else ttft_in_turn
    for scheme in schemes(12 * GB, 17 * GB, made, TIMES, overlapped=overlapped):
        for group in permutations(made, scheme.stages):
            need = [17 * GB] * scheme.full + [-(-17 * GB // scheme.stages)] * (scheme.stages - scheme.full)
            if all(x.free >= n for x, n in zip(group, need, strict=True)):
                assert scheme.ttft <= formula(12 * GB, scheme.stages, scheme.full, group, TIMES) + 1e-9


def test_options_are_chosen_as_schemes_are() -> None:
    wanted = ask(slo_ttft_s=10.0, slo_tpot_s=0.1)
    alone = option("a/0", 14.0)
    pipeline = option("b/0", 8.0, "pipeline", stages=4, full_workers=1, tpot_s=0.09)
    crowded = option("c/0", 7.0, "pipeline", stages=2, full_workers=1, tpot_s=0.09, sharing=1)
    slow = option("d/0", 6.0, "pipeline", stages=4, full_workers=0, tpot_s=0.2)
    assert hydraserve.choose(wanted, [alone, pipeline, crowded, slow], "") == pipeline
    assert hydraserve.choose(wanted, [alone, slow], "") == alone
    assert hydraserve.choose(wanted, [slow], "") is None
    assert hydraserve.choose(wanted, [pipeline, ready := option("e/0", 0.0, "ready")], "") == ready


def test_pipeline_is_no_smaller_than_the_workers_that_the_model_lacks() -> None:
    wanted = ask(slo_ttft_s=10.0, slo_tpot_s=0.1, missing_workers=3)
    small = option("a/0", 8.0, "pipeline", stages=2, full_workers=2, tpot_s=0.05)
    low = option("b/0", 7.0, "pipeline", stages=4, full_workers=0, tpot_s=0.09)
    large = option("c/0", 6.0, "pipeline", stages=4, full_workers=3, tpot_s=0.07)
    assert hydraserve.choose(wanted, [small, low, large], "") == large
    assert hydraserve.choose(wanted, [small, low], "") == small  # two instances, where three are not within the objectives
    assert hydraserve.choose(replace(wanted, missing_workers=1), [small, low, large], "") == low
    assert hydraserve.choose(replace(wanted, missing_workers=9), [small, low, large], "") == large


def test_server_accepts_another_fetch_only_if_all_fetches_keep_their_deadlines() -> None:
    """A server takes another fetch only if all fetches keep their deadlines.

    2 GB/s. 8 GB until 5 s: alone it needs 4 s; with another from the start it would need 8 s.
    """
    ledger = record_begin(Ledger(2.0 * GB), "a", 8 * GB, 5.0, 0.0)
    assert share(ledger, 0.0) == 1.0 * GB
    assert share(ledger, 0.0, joins=True) == 2.0 * GB
    assert not accepts(ledger, 0.0)
    assert accepts(ledger, 3.5)  # 1 GB is left, and 1.5 s at 1 GB/s
    assert settle(ledger, 3.0).fetches["a"].pending == pytest.approx(2 * GB)
    assert not settle(ledger, 4.1).fetches


def test_equation_4_over_changes_of_the_number_of_fetches() -> None:
    ledger = record_begin(Ledger(2.0 * GB), "a", 8 * GB, 99.0, 0.0)
    ledger = record_begin(ledger, "b", 4 * GB, 99.0, 1.0)  # a has 6 GB left
    at = settle(ledger, 3.0)
    assert {k: f.pending for k, f in at.fetches.items()} == pytest.approx({"a": 4 * GB, "b": 2 * GB})
    alone = record_end(at, "b", 3.0)
    assert settle(alone, 4.0).fetches["a"].pending == pytest.approx(2 * GB)
    assert share(alone, 5.0) == 2.0 * GB


def demand(waiting: int, running: int = 0, live: int = 0, window: int = 0, peak: int = 0) -> Demand:
    return Demand("m", waiting, running, live, capacity=8, window_requests=window, peak_requests=peak, max_replicas=16)


def test_workers_for_the_queue_and_the_next_window() -> None:
    assert scale(demand(waiting=1)) == 1
    assert scale(demand(waiting=20, window=12)) == 4
    assert scale(demand(waiting=4, window=2, peak=30)) == 5
    assert scale(demand(waiting=0, live=3, window=90)) == 3
    assert scale(demand(waiting=400)) == 16


def test_a_surge_is_started_in_groups_of_four_at_most() -> None:
    assert groups(0) == []
    assert groups(1) == [1]
    assert groups(1, stages=4) == [4]
    assert groups(10) == [4, 4, 2]


def test_whole_instances_for_running_requests_also_if_none_waits() -> None:
    assert needed_workers(demand(waiting=0, running=33)) == 5
    assert needed_workers(demand(waiting=4, running=4, window=12)) == 2
    assert needed_workers(demand(waiting=0)) == 0


@given(st.integers(0, 200), st.integers(1, 16))
def test_successors_share_the_requests_of_a_group_evenly(requests: int, workers: int) -> None:
    left, shares = requests, list[int]()
    for _ in range(workers - 1):
        shares.append(min(left, share_requests(left, requests - left, workers, 0)))
        left -= shares[-1]
    shares.append(left)
    assert sum(shares) == requests
    assert max(shares) == -(-requests // workers)
