"""A response that is cut off anywhere and resumed equals the undisturbed response.

Text, tokens, log-probabilities and the finish reason are compared.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from services.engine.generation.events import Yielded
from services.engine.generation.philox import Draw
from services.engine.generation.prepared_prefixes import Computed
from services.engine.generation.runner import Row, Runner
from shared.contracts.inference import ResumedChoice
from shared.errors import Conflict, InsufficientMemory
from tests.integration.engine.loaded_model import BF16_NEAR_TIE, LoadedModel
from tests.integration.engine.model_families import save
from tests.integration.engine.recorded_batcher import PROMPT, TOKENS, HeldBatcher, RecordedBatcher, cut, flat, request

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module", params=["llama", "llama-dynamic-rope", "mistral-window"])
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, demo_directory: Path) -> Iterator[LoadedModel]:
    """Load models that compute in packs, one by one, and with a sliding window."""
    directory = save(request.param, tmp_path_factory.mktemp("resume") / "m", demo_directory, torch.float32)
    loaded = LoadedModel(directory, "float32")
    yield loaded
    loaded.close()


@pytest.fixture
def reported(loaded: LoadedModel) -> Iterator[RecordedBatcher]:
    reported = RecordedBatcher(loaded)
    yield reported
    reported.close()


BODIES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 1.0, "top_p": 0.95, "n": 2},
    "penalised": {"temperature": 0.8, "frequency_penalty": 0.6, "presence_penalty": 0.3, "repetition_penalty": 1.3, "seed": 7},
    "logprobs": {"logprobs": 3},
    "echo": {"echo": True},
}


@pytest.mark.parametrize("body", BODIES)
def test_resumed_response_equals_the_undisturbed_one_at_any_cut(loaded: LoadedModel, reported: RecordedBatcher, body: str) -> None:
    first = request(loaded, "whole", **BODIES[body])
    whole = reported.answer(first)
    for count in (1, 2, 13, TOKENS - 1):
        at = {index: min(count + 3 * index, TOKENS) for index in whole}
        resume = cut(whole, at, first)
        rest = reported.answer(request(loaded, f"cut-{count}", resume, **BODIES[body]))
        for index, deltas in whole.items():
            assert flat([*deltas[: at[index]], *rest.get(index, [])]) == flat(deltas), (body, count, index)


def test_stop_strings_are_found_across_the_cut(loaded: LoadedModel, reported: RecordedBatcher) -> None:
    text = flat(reported.answer(request(loaded, "plain"))[0])[0]
    for start in range(4, 20, 3):
        stop = text[start : start + 6]
        first = request(loaded, f"whole-{start}", stop=[stop, "never sent"])
        whole = reported.answer(first)
        assert whole[0][-1].finish_reason == "stop"
        for count in range(1, len(whole[0])):
            name = f"stop-{start}-{count}"
            rest = reported.answer(request(loaded, name, cut(whole, {0: count}, first), stop=[stop, "never sent"]))
            assert flat([*whole[0][:count], *rest[0]]) == flat(whole[0]), (stop, count)


def test_resume_state_with_a_complete_response_ends_immediately(loaded: LoadedModel, reported: RecordedBatcher) -> None:
    """A resume state whose tokens complete the response ends at once.

    The previous engine died, or was of another kind, before it reported the end.
    """
    first = request(loaded, "whole", n=2)
    whole = reported.answer(first)
    resume = cut(whole, {0: TOKENS, 1: TOKENS}, first)
    unsaid = [c.model_copy(update={"finish_reason": None, "text_chars": 3}) for c in resume.choices]
    rest = reported.answer(request(loaded, "rest", resume.model_copy(update={"choices": tuple(unsaid)}), n=2))
    text = flat(whole[0])[0]
    assert [flat(rest[i]) for i in (0, 1)] == [(text[3:], [], [], ["length"])] * 2
    # If it reported the end of all choices, only the final message is missing.
    done = request(loaded, "done", resume, n=2)
    assert reported.answer(done) == {}


def test_response_that_cannot_be_resumed_is_refused(loaded: LoadedModel, reported: RecordedBatcher) -> None:
    first = request(loaded, "whole")
    resume = cut(reported.answer(first), {0: 4}, first)
    for changes in ({"revision": "other"}, {"prompt_tokens": 3}, {"choices": (ResumedChoice(index=4, token_ids=(1,)),)}):
        with pytest.raises(Conflict) as refused:
            request(loaded, "r", resume.model_copy(update=changes))
        assert refused.value.param == "resume"


def test_yielded_request_ends_after_its_last_token(loaded: LoadedModel) -> None:
    first = request(loaded, "long", max_tokens=90)
    held = HeldBatcher(loaded)
    try:
        held.hold_at(5)
        held.batcher.submit(first)
        held.until(lambda: len(held.deltas.get("long", {}).get(0, ())) >= 5)
        held.batcher.yield_("long")
        held.until(lambda: "long" in held.over)
        assert isinstance(held.ends[-1], Yielded)
        held.release()
        made = len(held.deltas["long"][0])
        rest = held.answer(request(loaded, "rest", cut(held.deltas["long"], {0: made}, first), max_tokens=90))
        assert len(held.deltas["long"][0]) == made
        whole = held.answer(request(loaded, "whole", max_tokens=90))
        assert flat([*held.deltas["long"][0], *rest[0]]) == flat(whole[0])
    finally:
        held.close()


def test_prepared_kv_cache_is_used(loaded: LoadedModel, reported: RecordedBatcher) -> None:
    first = request(loaded, "whole")
    whole = reported.answer(first)
    tokens = flat(whole[0])[1]
    assert reported.prepare("p", [*PROMPT, *tokens[:5]]) == Computed(len(PROMPT) + 4)
    # An extended prefix computes only the rest; state prepared for other tokens is not used.
    assert reported.prepare("p", [*PROMPT, *tokens[:9]]) == Computed(4)
    assert reported.prepare("q", [*PROMPT[:-1], 999, 998]) == Computed(len(PROMPT))
    for name, count in (("p", 10), ("q", 10)):
        rest = reported.answer(request(loaded, f"rest-{name}", cut(whole, {0: count}, first, prepared=name)))
        assert flat([*whole[0][:count], *rest[0]]) == flat(whole[0])
    assert reported.prepare("p", [*PROMPT, *tokens[:5]]) == Computed(len(PROMPT) + 4)  # it was released with its request
    reported.batcher.discard_prepared("p")
    assert reported.prepare("p", [*PROMPT, *tokens[:5]]) == Computed(len(PROMPT) + 4)


def test_prepared_prefixes_expire(loaded: LoadedModel, reported: RecordedBatcher) -> None:
    assert reported.prepare("p", PROMPT, keep_s=0.01) == Computed(len(PROMPT) - 1)
    reported.answer(request(loaded, "other"))
    assert reported.prepare("p", PROMPT) == Computed(len(PROMPT) - 1)


def test_long_preparation_is_answered_in_parts(loaded: LoadedModel, reported: RecordedBatcher) -> None:
    sequence, chunk = list(range(1, 401)), loaded.limits.chunk_tokens
    parts = [reported.prepare("p", sequence, answer_s=0.0)]
    while isinstance(parts[-1], Computed) and parts[-1].left:
        parts.append(reported.prepare("p", sequence, answer_s=0.0))
    steps = [min(chunk, 399 - at) for at in range(0, 399, chunk)]
    assert parts == [Computed(n, 399 - sum(steps[: i + 1])) for i, n in enumerate(steps)]


def test_running_requests_gain_a_token_in_every_step_of_a_preparation(loaded: LoadedModel) -> None:
    """Running sequences gain a token in every step during a preparation.

    The preparation runs after them, in chunks: each token is delayed by at most a part of one
    chunk.
    """
    small = LoadedModel.__new__(LoadedModel)
    small.__dict__ = loaded.__dict__ | {"limits": dataclasses.replace(loaded.limits, chunk_tokens=64)}
    rows: list[list[int]] = []
    assert loaded.computable.runner is not None
    runner: Runner = loaded.computable.runner

    class Counting:
        rewinds = runner.rewinds
        new_state = staticmethod(runner.new_state)
        forget = staticmethod(runner.forget)

        def forward(self, batch: Sequence[Row]) -> torch.Tensor:
            rows.append([len(row.tokens) for row in batch])
            return runner.forward(batch)

    held = HeldBatcher(small, Counting())
    try:
        held.hold_at(5)
        held.batcher.submit(request(loaded, "runs", max_tokens=90))
        held.until(lambda: len(held.deltas.get("runs", {}).get(0, ())) >= 5)
        wait = held.begin_preparing("p", list(range(1, 200)))
        held.release()
        assert wait() == Computed(198)
        held.until(lambda: "runs" in held.over)
    finally:
        held.close()
    beside = [row for row in rows if len(row) > 1]
    assert [row[0] for row in beside] == [1] * len(beside)
    assert sum(row[1] for row in beside) == 198
    assert max(row[1] for row in beside) == 8


def test_preparation_never_takes_memory_from_requests(loaded: LoadedModel) -> None:
    small = LoadedModel.__new__(LoadedModel)
    small.__dict__ = loaded.__dict__ | {"limits": type(loaded.limits)(8, 3, 8192, 16)}
    reported = RecordedBatcher(small)
    try:
        assert isinstance(reported.prepare("too much", list(range(1, 400)), list(range(1, 400))), InsufficientMemory)
        assert reported.prepare("p", list(range(1, 300))) == Computed(298)
        # Three requests need all three blocks: the kept prefix is evicted.
        reported.answer(*(request(loaded, f"r{i}", prompt=list(range(1, 90)), max_tokens=35) for i in range(3)))
        assert reported.prepare("p", list(range(1, 300))) == Computed(298)
    finally:
        reported.close()


@pytest.mark.parametrize("body", [{}, *({"temperature": 1.0, "seed": seed} for seed in range(4))], ids=str)
def test_bfloat16_departs_only_at_near_ties(tmp_path: Path, demo_directory: Path, body: dict[str, Any]) -> None:
    """In bfloat16 a resumed response departs from the undisturbed one only at a near-tie.

    Greedy: of the two tokens' logits. Sampled: of their logits with the request's random numbers,
    of which the sampler takes the largest.
    """
    loaded = LoadedModel(save("llama", tmp_path / "m", demo_directory, torch.bfloat16), "bfloat16")
    reported = RecordedBatcher(loaded)
    try:
        first = request(loaded, "whole", **body)
        whole = reported.answer(first)
        alone = flat(whole[0])[1]
        for count in (3, 11, 20):
            rest = reported.answer(request(loaded, f"r{count}", cut(whole, {0: count}, first), **body))
            mixed = flat([*whole[0][:count], *rest[0]])[1]
            assert mixed[:count] == alone[:count]
            at = next((k for k, (a, b) in enumerate(zip(alone, mixed, strict=True)) if a != b), None)
            if at is not None:
                with torch.inference_mode():
                    logits = loaded.reference(torch.tensor([PROMPT + alone[:at]])).logits[0, -1].float()
                score = logits
                if body:
                    uniform = torch.from_numpy(Draw(first.params.seed, 0, at).draw_uniform(logits.shape[-1]))
                    score = logits - torch.log(-torch.log1p(-uniform))
                assert abs(float(score[alone[at]] - score[mixed[at]]) / float(logits.std())) <= BF16_NEAR_TIE
    finally:
        reported.close()
        loaded.close()
