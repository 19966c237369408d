from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.engine.domain.params import SamplingParams
from services.engine.domain.randomness import uniform
from services.engine.sampling import History, sample

NOTHING = History(frozenset(), Counter())
LOGITS = torch.tensor([1.0, 3.0, 2.0, -1.0, 2.5])


def drawn(params: SamplingParams, logits: torch.Tensor = LOGITS, history: History = NOTHING, draws: int = 500) -> Counter[int]:
    return Counter(sample(logits, params, history, (i + 0.5) / draws).token for i in range(draws))


def test_numbers_depend_on_seed_choice_and_position_only() -> None:
    assert uniform(7, 0, 3) == uniform(7, 0, 3)
    assert len({uniform(s, c, p) for s in range(5) for c in range(5) for p in range(5)}) == 125
    assert uniform(-1, 0, 0) == uniform(2**64 - 1, 0, 0)


@given(st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**31), st.integers(0, 2**31))
def test_numbers_are_in_range(seed: int, choice: int, position: int) -> None:
    assert 0 <= uniform(seed, choice, position) < 1


def test_draws_follow_the_distribution() -> None:
    counts = drawn(SamplingParams(temperature=1.0), draws=4000)
    for token, p in enumerate(torch.softmax(LOGITS, 0).tolist()):
        assert counts[token] / 4000 == pytest.approx(p, abs=0.002)


@pytest.mark.parametrize(
    ("params", "allowed"),
    [
        (SamplingParams(temperature=0.0), {1}),
        (SamplingParams(top_k=2), {1, 4}),
        (SamplingParams(top_k=1), {1}),
        (SamplingParams(top_p=0.01), {1}),
        (SamplingParams(top_p=0.6), {1, 4}),
        (SamplingParams(min_p=0.5), {1, 4}),
        (SamplingParams(logit_bias=((1, -100.0),), top_k=1), {4}),
        (SamplingParams(temperature=0.0, logit_bias=((3, 100.0),)), {3}),
    ],
)
def test_what_may_be_drawn(params: SamplingParams, allowed: set[int]) -> None:
    assert set(drawn(params)) == allowed


def test_top_p_of_a_large_vocabulary_is_the_same_sorted_in_part_or_whole() -> None:
    torch.manual_seed(0)
    peaked, flat = torch.randn(5000) * 4, torch.randn(5000) * 0.01
    for logits in (peaked, flat):
        kept = set(drawn(SamplingParams(top_p=0.7), logits, draws=300))
        probabilities, ids = torch.softmax(logits, 0).sort(descending=True)
        nucleus = int((probabilities.double().cumsum(0) - probabilities.double() < 0.7).sum())
        assert kept <= set(ids[:nucleus].tolist())


def test_penalties_use_the_history() -> None:
    seen = History(frozenset({1}), Counter({4: 3}))
    assert sample(LOGITS, SamplingParams(temperature=0, repetition_penalty=10.0), seen, 0).token == 2
    assert sample(LOGITS, SamplingParams(temperature=0, presence_penalty=2.0), History(frozenset(), Counter({1: 1})), 0).token == 4
    once, often = History(frozenset(), Counter({1: 1})), History(frozenset(), Counter({1: 9}))
    assert sample(LOGITS, SamplingParams(temperature=0, frequency_penalty=0.2), once, 0).token == 1
    assert sample(LOGITS, SamplingParams(temperature=0, frequency_penalty=0.2), often, 0).token == 4


def test_log_probabilities_are_the_models_own() -> None:
    told = sample(LOGITS, SamplingParams(temperature=0, logit_bias=((3, 100.0),), top_logprobs=2), NOTHING, 0)
    expected = torch.log_softmax(LOGITS, 0)
    assert told.token == 3
    assert told.logprob == pytest.approx(float(expected[3]))
    assert [t for t, _ in told.top] == [1, 4]
    assert told.top[0][1] == pytest.approx(float(expected[1]))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(-30, 30), min_size=1, max_size=40),
    st.floats(0, 2),
    st.floats(0.01, 1),
    st.integers(0, 50),
    st.floats(0, 1),
    st.floats(0, 1, exclude_max=True),
)
def test_a_token_is_always_found(
    values: list[float], temperature: float, top_p: float, top_k: int, min_p: float, draw: float
) -> None:
    logits = torch.tensor(values)
    params = SamplingParams(temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p)
    assert 0 <= sample(logits, params, NOTHING, draw).token < len(values)
