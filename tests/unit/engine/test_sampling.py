from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.engine.domain.sampling_params import SamplingParams
from services.engine.generation.philox import Draw
from services.engine.generation.sampling import History, sample
from tests.support.examples import examples

NOTHING = History(frozenset(), Counter())
FIRST = Draw(0, 0, 0)
LOGITS = torch.tensor([1.0, 3.0, 2.0, -1.0, 2.5])


def drawn(params: SamplingParams, logits: torch.Tensor = LOGITS, history: History = NOTHING, draws: int = 500) -> Counter[int]:
    return Counter(sample(logits, params, history, Draw(11, 0, i)).token for i in range(draws))


def test_numbers_depend_on_seed_choice_and_position_only() -> None:
    assert np.array_equal(Draw(7, 0, 3).draw_uniform(50), Draw(7, 0, 3).draw_uniform(50))
    assert len({Draw(s, c, p).draw_uniform(1)[0] for s in range(5) for c in range(5) for p in range(5)}) == 125
    assert np.array_equal(Draw(-1, 0, 0).draw_uniform(3), Draw(2**64 - 1, 0, 0).draw_uniform(3))
    assert np.array_equal(Draw(7, 0, 3).draw_uniform(1000)[:37], Draw(7, 0, 3).draw_uniform(37))


@given(st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**31), st.integers(0, 2**31))
def test_numbers_are_in_range(seed: int, choice: int, position: int) -> None:
    numbers = Draw(seed, choice, position).draw_uniform(100)
    assert ((numbers >= 0) & (numbers < 1)).all()


def test_random_numbers_are_uniform() -> None:
    numbers = np.sort(np.concatenate([Draw(3, 0, i).draw_uniform(500) for i in range(40)]))
    # The Kolmogorov-Smirnov distance, below its 99.9 % quantile.
    distance = np.abs(numbers - (np.arange(numbers.size) + 0.5) / numbers.size).max()
    assert distance < 1.95 / np.sqrt(numbers.size)


def test_draws_follow_the_distribution() -> None:
    counts = drawn(SamplingParams(temperature=1.0), draws=20_000)
    for token, p in enumerate(torch.softmax(LOGITS, 0).tolist()):
        assert counts[token] / 20_000 == pytest.approx(p, abs=4 * (p * (1 - p) / 20_000) ** 0.5)


@pytest.mark.parametrize(
    "params", [SamplingParams(), SamplingParams(top_k=40), SamplingParams(top_p=0.9), SamplingParams(min_p=0.2)]
)
def test_rounding_does_not_change_sampled_tokens(params: SamplingParams) -> None:
    """Rounding does not change sampled tokens.

    A flat distribution is recomputed in another batch or engine, and thousands of ranks and
    probabilities have moved.
    """
    source = torch.Generator().manual_seed(1)
    logits = torch.randn(20_000, generator=source) * 1e-3
    logits[:300] += 8.0
    again = logits + (torch.rand(20_000, generator=source) - 0.5) * 4e-6
    assert not torch.equal(logits.argsort(), again.argsort())
    for position in range(200):
        assert sample(logits, params, NOTHING, Draw(2, 0, position)) == sample(again, params, NOTHING, Draw(2, 0, position))


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
def test_sampling_parameters_restrict_the_tokens(params: SamplingParams, allowed: set[int]) -> None:
    assert set(drawn(params)) == allowed


def test_top_p_of_a_large_vocabulary_samples_only_the_nucleus() -> None:
    torch.manual_seed(0)
    peaked, flat = torch.randn(5000) * 4, torch.randn(5000) * 0.01
    for logits in (peaked, flat):
        kept = set(drawn(SamplingParams(top_p=0.7), logits, draws=300))
        probabilities, ids = torch.softmax(logits, 0).sort(descending=True)
        nucleus = int((probabilities.double().cumsum(0) - probabilities.double() < 0.7).sum())
        assert kept <= set(ids[:nucleus].tolist())


def test_penalties_use_the_history() -> None:
    seen = History(frozenset({1}), Counter({4: 3}))
    assert sample(LOGITS, SamplingParams(temperature=0, repetition_penalty=10.0), seen, FIRST).token == 2
    assert (
        sample(LOGITS, SamplingParams(temperature=0, presence_penalty=2.0), History(frozenset(), Counter({1: 1})), FIRST).token == 4
    )
    once, often = History(frozenset(), Counter({1: 1})), History(frozenset(), Counter({1: 9}))
    assert sample(LOGITS, SamplingParams(temperature=0, frequency_penalty=0.2), once, FIRST).token == 1
    assert sample(LOGITS, SamplingParams(temperature=0, frequency_penalty=0.2), often, FIRST).token == 4


def test_log_probabilities_ignore_bias_and_temperature() -> None:
    sampled = sample(LOGITS, SamplingParams(temperature=0, logit_bias=((3, 100.0),), top_logprobs=2), NOTHING, FIRST)
    expected = torch.log_softmax(LOGITS, 0)
    assert sampled.token == 3
    assert sampled.logprob == pytest.approx(float(expected[3]))
    assert [t for t, _ in sampled.top] == [1, 4]
    assert sampled.top[0][1] == pytest.approx(float(expected[1]))


@settings(max_examples=examples(60), deadline=None)
@given(
    st.lists(st.floats(-30, 30), min_size=1, max_size=40),
    st.floats(0, 2),
    st.floats(0.01, 1),
    st.integers(0, 50),
    st.floats(0, 1),
    st.integers(0, 2**31),
)
def test_a_token_is_always_found(
    values: list[float], temperature: float, top_p: float, top_k: int, min_p: float, position: int
) -> None:
    logits = torch.tensor(values)
    params = SamplingParams(temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p)
    assert 0 <= sample(logits, params, NOTHING, Draw(0, 0, position)).token < len(values)
