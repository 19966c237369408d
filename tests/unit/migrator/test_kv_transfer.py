"""For each request, keys and values are sent or recomputed: the way that is predicted sooner."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.migrator.domain.rounds import UNKNOWN_LINK, Speed, choose_way, learn_speed, transfer_speed
from services.migrator.domain.speeds import LearnedSpeeds
from services.migrator.domain.work import Options
from shared.contracts.migration import MigrationRecord
from tests.unit.migrator.world import World


@given(
    st.integers(1, 10_000), st.floats(0.001, 10), st.floats(0, 100), st.floats(1e-4, 1), st.floats(0, 100), st.integers(1, 1 << 20)
)
def test_the_way_that_is_predicted_sooner_is_chosen(
    tokens: int, per_token: float, fixed: float, per_kib: float, link_fixed: float, token_bytes: int
) -> None:
    recompute, link = Speed(per_token, fixed), Speed(per_kib, link_fixed)
    way = choose_way(tokens, token_bytes, recompute, link)
    sent_ms = transfer_speed(link, token_bytes).predict_ms(tokens)
    assert (way == "transfer") == (sent_ms < recompute.predict_ms(tokens))
    assert choose_way(tokens, None, recompute, link) == "recompute"


def test_bytes_per_second_are_learned() -> None:
    link = UNKNOWN_LINK
    for kib in (100, 4000, 100, 8000, 500, 16_000):
        link = learn_speed(link, kib, 3.0 + kib / 1000)
    assert transfer_speed(link, 2048).predict_ms(1000) == pytest.approx(3.0 + 2.0, rel=0.05)


def world(**engine: object) -> World:
    made = World()
    made.engines["a"].offers = True
    for name, value in engine.items():
        setattr(made.engines["b"], name, value)
    return made


def ways(record: MigrationRecord) -> list[bool]:
    return [r.kv_tokens > 0 for r in record.rounds]


def test_request_with_an_offer_is_sent_and_moves_without_recomputation() -> None:
    made = world(ms_per_token=1.0)
    record = made.migrate(request := made.request(tokens=900.0))
    assert (record.state, request.at) == ("done", "b")
    assert all(ways(record))
    assert sum(r.tokens for r in record.rounds) == 0
    assert record.rounds[0].kv_bytes == record.rounds[0].kv_tokens * 1024 > 900 * 1024
    moved = record.requests[0]
    assert moved.predicted_ms is not None
    assert moved.predicted_ms < 1000.0


def test_slow_link_is_learned_and_the_rest_is_recomputed() -> None:
    made = world(ms_per_token=1.0, ms_per_kib=20.0)
    record = made.migrate(made.request(tokens=5000.0))
    assert record.state == "done"
    assert ways(record)[0]
    assert not ways(record)[1]


def test_each_pair_of_nodes_has_a_link_speed_of_its_own() -> None:
    """20 ms per KiB to node c, 0.1 ms to node b; recomputing a token, of 1 KiB, takes 1 ms."""
    made = world(ms_per_token=1.0, ms_per_kib=0.1)
    made.engines["c"].ms_per_token, made.engines["c"].ms_per_kib = 1.0, 20.0
    migrator = made.migrator()
    migrator.learned = learned = LearnedSpeeds()
    kept = []
    for turn in range(2):
        for destination in "cb":
            order = made.order(made.request(tokens=1500.0), destination=destination)
            made.settle()
            kept.append(made.record(order))
            assert kept[-1].state == "done", (turn, destination)
    slow, fast = (learned.link(kept[n]).predict_ms(1500) for n in (2, 3))
    unknown = learned.link(kept[0].model_copy(update={"source_node": "node-d"})).predict_ms(1500)
    assert slow > 1500 * 10 > 1500 > fast
    assert unknown == UNKNOWN_LINK.predict_ms(1500)
    # The first requests try their link. Of the next ones, that over the slow link is recomputed.
    assert [ways(record)[0] for record in kept] == [True, True, False, True]


@pytest.mark.parametrize("stages", [1, 4])
def test_bytes_of_all_stages_are_compared_with_recomputation(stages: int) -> None:
    """A token has 4 KiB in all stages: 2.4 ms, and 2 ms to recompute. The first round measures."""
    made = world(ms_per_token=2.0, ms_per_kib=0.6, token_bytes=4096)
    made.engines["a"].token_bytes, made.engines["a"].stages = 4096, stages
    record = made.migrate(made.request(tokens=900.0))
    assert record.state == "done"
    assert all(r.kv_bytes == r.kv_tokens * 4096 for r in record.rounds)
    first, *later = ways(record)
    assert first
    assert later
    assert not any(later)


@pytest.mark.parametrize(("refusal", "receives"), [("a piece was damaged on its way", True), ("", False)])
def test_request_that_could_not_be_received_is_recomputed_from_then_on(refusal: str, receives: bool) -> None:
    """`receives` is false for an engine of the previous version, which ignores the offer."""
    made = world(ms_per_token=1.0, refusal=refusal, receives=receives)
    record = made.migrate(request := made.request(tokens=900.0))
    assert (record.state, request.at) == ("done", "b")
    assert not any(ways(record))
    assert [bool(r.kv_reason) for r in record.rounds] == [True] + [False] * (len(record.rounds) - 1)
    assert refusal in record.rounds[0].kv_reason


def test_cheap_recomputation_is_preferred() -> None:
    made = world(ms_per_token=0.01, ms_fixed=0.0, ms_per_kib=1.0)
    made.options = Options(at_once=2, pause_ms=50.0)
    record = made.migrate(made.request(tokens=60.0))
    later = [r for r in record.rounds if r.number > 1]
    assert record.state == "done"
    assert not any(r.kv_tokens for r in later)


@pytest.mark.parametrize(("kv", "is_sent"), [("never", False), ("always", True)])
def test_setting_decides_for_all(kv: str, is_sent: bool) -> None:
    made = world(ms_per_token=0.001, ms_fixed=0.0) if is_sent else world(ms_per_token=5.0)
    made.options = Options(at_once=2, pause_ms=50.0, kv=kv)  # type: ignore[arg-type]  # a parameter of the test
    record = made.migrate(made.request(tokens=900.0))
    assert record.state == "done"
    assert set(ways(record)) == {is_sent}
