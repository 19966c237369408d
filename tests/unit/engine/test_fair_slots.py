"""Fair shares of keys in the slots of one model."""

from __future__ import annotations

import random
from collections import Counter
from functools import cache

from hypothesis import given, settings
from hypothesis import strategies as st

from services.engine.domain.fair_slots import CREDIT, Arrangement, Claim, Flow, ReceivedTokens, arrange, predict_cost
from services.engine.domain.step_planning import MAX_PREEMPTIONS, Limits, SequenceView
from tests.support.examples import examples

LIMITS = Limits(4, 1000, 512, 256)
A, B = Flow(0, "a"), Flow(0, "b")


def _claim(key: int, flow: Flow, cost: float = 10.0, **view: int) -> Claim:
    return Claim(SequenceView(key, **{"length": 10, **view}), flow, cost)


def _tags(received: ReceivedTokens, running: list[Claim]) -> dict[Flow, float]:
    return received.tags(running)


def test_one_key_alone_changes_nothing() -> None:
    running = [_claim(i, A) for i in range(4)]
    assert arrange(running, [_claim(9, A)], {A: 100.0}, LIMITS) == Arrangement()


def test_a_new_key_pauses_the_newest_sequences_of_the_one_that_has_all_slots() -> None:
    received, running = ReceivedTokens(), [_claim(i, A) for i in range(4)]
    received.add(A, 1000.0)
    waiting = [_claim(9, A)]
    received.begin_waiting(_claim(10, B), running, waiting, 4)
    waiting += [_claim(10, B), _claim(11, B)]
    found = arrange(running, waiting, received.tags(running), LIMITS)
    assert found.paused == (3, 2)
    assert found.first[:2] == (10, 11)


def test_a_key_that_has_had_its_share_waits_for_a_free_slot() -> None:
    running = [_claim(0, A), _claim(1, A), _claim(2, B), _claim(3, B)]
    found = arrange(running, [_claim(9, A), _claim(10, B)], {A: 100.0, B: 95.0}, LIMITS)
    assert found == Arrangement(first=(10,))
    found = arrange(running[:3], [_claim(9, A), _claim(10, B)], {A: 100.0, B: 95.0}, LIMITS)
    assert found == Arrangement(first=(10, 9))


def test_the_slots_of_one_step_alternate_between_keys() -> None:
    waiting = [_claim(i, A) for i in range(4)] + [_claim(i, B) for i in range(4, 8)]
    assert arrange([], waiting, {}, LIMITS).first[:4] == (0, 4, 1, 5)


def test_a_higher_priority_pauses_a_lower_one_and_is_never_paused_by_it() -> None:
    low, high = Flow(-1, "a"), Flow(0, "a")
    running = [_claim(i, low) for i in range(4)]
    assert arrange(running, [_claim(9, high)], {high: 1e6}, LIMITS).paused == (3,)
    running = [_claim(i, high) for i in range(4)]
    assert arrange(running, [_claim(9, low)], {high: 1e6}, LIMITS).paused == ()


def test_sequences_that_lost_their_memory_or_have_the_turn_keep_their_place() -> None:
    waiting = [_claim(1, A, preemptions=1), _claim(2, A), _claim(3, B), _claim(4, A)]
    assert arrange([], waiting, {A: 1000.0}, LIMITS, turn=4).first == (4, 1, 3, 2)
    running = [_claim(i, A) for i in range(10, 14)]
    assert arrange(running, waiting, {A: 1000.0}, LIMITS).paused == ()


def test_the_sequence_of_the_turn_and_those_preempted_too_often_are_not_paused() -> None:
    running = [_claim(0, A), _claim(1, A), _claim(2, A), _claim(3, A, preemptions=MAX_PREEMPTIONS)]
    assert arrange(running, [_claim(9, B)], {A: 1000.0}, LIMITS, turn=2).paused == (1,)


def test_no_sequence_is_paused_if_the_new_one_does_not_fit() -> None:
    running = [_claim(i, A, length=128) for i in range(4)]
    limits = Limits(4, 8, 512, 256)
    assert arrange(running, [_claim(9, B, length=128)], {A: 1000.0}, limits).paused == (3,)
    assert arrange(running, [_claim(9, B, length=1024)], {A: 1000.0}, limits).paused == ()


def test_a_key_that_was_idle_has_a_bounded_credit_and_no_debt() -> None:
    received, running = ReceivedTokens(), [_claim(i, A) for i in range(4)]
    received.add(A, 1e6)
    received.begin_waiting(_claim(9, B), running, [], 4)
    assert received.tags([])[B] == 1e6 + 40 - CREDIT * 4 * 10
    received.begin_waiting(_claim(10, A), [], [], 4)
    received.begin_waiting(_claim(11, B), [_claim(10, A)], [], 4)
    assert received.tags([]) == {A: 1e6, B: 1e6 + 10 - CREDIT * 4 * 10}


def test_costs_are_predicted_from_the_prompt_and_the_limit() -> None:
    assert predict_cost(10, 10, 30, 0, 1.0) == 30
    assert predict_cost(10, 10, 5000, 0, 2.0) == (10 + 256) / 2
    assert predict_cost(20, 10, 30, 19, 1.0) == 11
    assert predict_cost(900, 10, 5000, 899, 1.0) == 1


def _run(arrivals: dict[int, list[tuple[Flow, int]]], steps: int, weights: dict[Flow, float]) -> tuple[Counter[Flow], Counter[int]]:
    """Run steps of a token for each slot; return tokens by flow, and pauses by sequence."""
    received, tokens, pauses = ReceivedTokens(), Counter[Flow](), Counter[int]()
    running: list[tuple[int, Flow, int]] = []
    waiting: list[tuple[int, Flow, int]] = []
    keys = 0

    @cache  # most sequences wait from step to step
    def claim(key: int, flow: Flow, left: int) -> Claim:
        return _claim(key, flow, left / weights.get(flow, 1.0))

    def claims(sequences: list[tuple[int, Flow, int]]) -> list[Claim]:
        return [claim(*sequence) for sequence in sequences]

    for step in range(steps):
        for flow, length in arrivals.get(step, ()):
            keys += 1
            if all(w[1] != flow for w in waiting):
                received.begin_waiting(claims([(keys, flow, length)])[0], claims(running), claims(waiting), 4)
            waiting.append((keys, flow, length))
        found = arrange(claims(running), claims(waiting), received.tags(claims(running)), LIMITS)
        pauses.update(found.paused)
        paused = [s for s in running if s[0] in found.paused]
        running = [s for s in running if s[0] not in found.paused]
        first = [next(w for w in waiting if w[0] == key) for key in found.first]
        waiting = [*first, *paused, *(w for w in waiting if w not in first)]
        while waiting and len(running) < 4:
            running.append(waiting.pop(0))
        for _, flow, _ in running:
            received.add(flow, 1 / weights.get(flow, 1.0))
            tokens[flow] += 1
        running = [(key, flow, left - 1) for key, flow, left in running if left > 1]
    assert sum(tokens.values()) <= 4 * steps
    return tokens, pauses


@settings(max_examples=examples(40), deadline=None)
@given(st.integers(1, 20), st.integers(1, 20), st.sampled_from([1.0, 2.0, 3.0]), st.integers(0, 50))
def test_keys_that_wait_all_the_time_get_shares_by_weight(length_a: int, length_b: int, weight: float, late: int) -> None:
    steps = 300
    arrivals = {0: [(A, length_a)] * (4 * steps // length_a + 1), late: [(B, length_b)] * (4 * steps // length_b + 1)}
    if not late:
        arrivals[0] = arrivals[0] + [(A, length_a)] * (4 * steps // length_a + 1)
    tokens, _ = _run(arrivals, steps, {B: weight})
    assert sum(tokens.values()) == 4 * steps, "a slot stayed free"
    share = 4 * (steps - late) * weight / (1 + weight)
    assert abs(tokens[B] - share) <= (CREDIT + 2) * 4 * max(length_a, length_b)


def test_pauses_end_once_shares_are_equal() -> None:
    _, pauses = _run({0: [(A, 10)] * 400, 53: [(B, 10)] * 400}, 300, {})
    assert pauses
    assert max(pauses.values()) <= 2
    assert sum(pauses.values()) <= 8


def _waits(arrivals: list[int], *, is_flooded: bool) -> list[int]:
    """Return the steps that each request of B waits for a slot; each takes 20 steps of 4 slots.

    Beside a flood, 8 requests of A are in the engine all the time.
    """
    received = ReceivedTokens()
    running: list[tuple[int, Flow, int]] = []
    waiting: list[tuple[int, Flow, int]] = []
    arrived, waits, keys = dict[int, int](), list[int](), 0

    def claims(sequences: list[tuple[int, Flow, int]]) -> list[Claim]:
        return [_claim(key, flow, float(left)) for key, flow, left in sequences]

    for step in range(arrivals[-1] + 200):
        count_a = sum(s[1] == A for s in (*running, *waiting))
        new = [A] * (8 - count_a if is_flooded else 0) + [B] * arrivals.count(step)
        for flow in new:
            keys += 1
            if all(w[1] != flow for w in waiting):
                received.begin_waiting(_claim(keys, flow, 20.0), claims(running), claims(waiting), 4)
            waiting.append((keys, flow, 20))
            arrived[keys] = step
        found = arrange(claims(running), claims(waiting), received.tags(claims(running)), LIMITS)
        paused = [s for s in running if s[0] in found.paused]
        running = [s for s in running if s[0] not in found.paused]
        first = [next(w for w in waiting if w[0] == key) for key in found.first]
        waiting = [*first, *paused, *(w for w in waiting if w not in first)]
        while waiting and len(running) < 4:
            running.append(waiting.pop(0))
            if running[-1][1] == B and running[-1][0] in arrived:
                waits.append(step - arrived.pop(running[-1][0]))
        for _, flow, _ in running:
            received.add(flow, 1.0)
        running = [(key, flow, left - 1) for key, flow, left in running if left > 1]
    assert len(waits) == len(arrivals)
    return sorted(waits)


def test_a_key_that_sends_half_of_its_share_waits_no_longer_beside_a_flood() -> None:
    draw, arrivals, at = random.Random(1), list[int](), 0.0
    for _ in range(300):
        at += draw.expovariate(0.05)  # one slot of four is busy with B on average; its share is two
        arrivals.append(int(at))
    assert _waits(arrivals, is_flooded=True) == _waits(arrivals, is_flooded=False)
