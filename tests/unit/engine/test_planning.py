from __future__ import annotations

from dataclasses import dataclass, field, replace

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from services.engine.domain.step_planning import BLOCK_TOKENS, MAX_PREEMPTIONS, Limits, SequenceView, Work, blocks_for, plan_step
from tests.support.examples import examples

LIMITS = Limits(max_sequences=4, kv_blocks=10, step_tokens=1000, chunk_tokens=64)


def test_decoding_precedes_prefill_and_prompts_share_a_chunk() -> None:
    running = [SequenceView(1, 300, 10), SequenceView(2, 50, 49)]
    assert plan_step(running, [], LIMITS).work == (Work(2, 1), Work(1, 64))


def test_single_prompt_is_computed_in_one_step() -> None:
    plan = plan_step([], [SequenceView(1, 700)], LIMITS)
    assert (plan.admitted, plan.work) == ((1,), (Work(1, 700),))


def test_a_long_prompt_is_cut_at_the_step_limit() -> None:
    assert plan_step([], [SequenceView(1, 1200)], LIMITS).work == (Work(1, 1000),)


def test_youngest_sequence_is_preempted_when_blocks_run_out() -> None:
    running = [SequenceView(1, 5 * BLOCK_TOKENS + 1, 5 * BLOCK_TOKENS), SequenceView(2, 5 * BLOCK_TOKENS, 5 * BLOCK_TOKENS - 1)]
    plan = plan_step(running, [SequenceView(3, 10)], LIMITS)
    assert (plan.preempted, plan.admitted, plan.work) == ((2,), (), (Work(1, 1),))


def test_sequence_without_room_blocks_those_behind() -> None:
    running = [SequenceView(1, 5 * BLOCK_TOKENS, 5 * BLOCK_TOKENS - 1)]
    waiting = [SequenceView(2, 6 * BLOCK_TOKENS), SequenceView(3, 10)]
    assert plan_step(running, waiting, LIMITS).admitted == ()


def test_number_of_sequences_is_limited() -> None:
    waiting = [SequenceView(i, 10) for i in range(9)]
    assert plan_step([], waiting, LIMITS).admitted == (0, 1, 2, 3)


def test_prompts_of_lower_priority_leave_their_tokens_to_a_waiting_request() -> None:
    batch = [SequenceView(1, 500, 10, priority=-100), SequenceView(2, 50, 49, priority=-100)]
    plan = plan_step(batch, [SequenceView(3, 40), SequenceView(4, 100, priority=-100)], LIMITS)
    assert (plan.admitted, plan.work) == ((3,), (Work(2, 1), Work(3, 40), Work(1, 8)))
    own = [replace(view, priority=0) for view in batch]
    assert plan_step(own, [SequenceView(3, 40)], LIMITS).work == (Work(2, 1), Work(1, 64))


def test_prompts_of_negative_priority_have_a_small_part_of_a_chunk_beside_others() -> None:
    decoding = SequenceView(1, 50, 49)
    assert plan_step([decoding], [SequenceView(2, 500, priority=-100)], LIMITS).work == (Work(1, 1), Work(2, 8))
    assert plan_step([replace(decoding, priority=10)], [SequenceView(2, 500)], LIMITS).work == (Work(1, 1), Work(2, 64))
    alone = replace(decoding, priority=-100)
    assert plan_step([alone], [SequenceView(2, 500, priority=-100)], LIMITS).work == (Work(1, 1), Work(2, 64))


def test_prompts_are_computed_by_priority() -> None:
    running = [SequenceView(1, 900, 10, priority=-100), SequenceView(2, 60, 30), SequenceView(3, 50, 49)]
    assert plan_step(running, [], LIMITS).work == (Work(3, 1), Work(2, 30), Work(1, 8))


def test_the_lowest_priority_loses_its_memory_first() -> None:
    running = [
        SequenceView(1, 5 * BLOCK_TOKENS, 5 * BLOCK_TOKENS - 1, priority=-100),
        SequenceView(2, 5 * BLOCK_TOKENS + 1, 5 * BLOCK_TOKENS),
    ]
    plan = plan_step(running, [], LIMITS)
    assert (plan.preempted, plan.work) == ((1,), (Work(2, 1),))
    assert plan_step(running, [], LIMITS, protected=1).preempted == ()


@given(st.integers(1, 10 * BLOCK_TOKENS))
def test_sequence_that_fits_alone_is_admitted_alone(length: int) -> None:
    assert plan_step([], [SequenceView(1, length)], LIMITS).admitted == (1,)


def test_protected_sequence_waits_for_memory_and_keeps_its_own() -> None:
    running = [SequenceView(1, 10 * BLOCK_TOKENS + 1, 10 * BLOCK_TOKENS)]
    assert plan_step(running, [], LIMITS, protected=1).preempted == ()
    assert plan_step(running, [], LIMITS).preempted == (1,)


def test_aged_sequence_is_admitted_first_or_where_its_greatest_length_fits() -> None:
    running = [SequenceView(1, 10, 9, greatest_length=6 * BLOCK_TOKENS)]
    aged = SequenceView(2, 10, preemptions=MAX_PREEMPTIONS, greatest_length=5 * BLOCK_TOKENS)
    assert plan_step(running, [aged], LIMITS).admitted == ()
    assert plan_step(running, [replace(aged, greatest_length=4 * BLOCK_TOKENS)], LIMITS).admitted == (2,)
    few = replace(LIMITS, guaranteed_blocks=4)
    assert plan_step([], [aged], few).admitted == ()
    assert plan_step([], [aged], few, protected=2).admitted == (2,)


@dataclass
class Model:
    key: int
    prompt: int
    output: int
    length: int = field(init=False)
    computed: int = 0
    preemptions: int = 0

    def __post_init__(self) -> None:
        self.length = self.prompt

    @property
    def view(self) -> SequenceView:
        return SequenceView(self.key, self.length, self.computed, self.preemptions, self.prompt + self.output)


class Steps(RuleBasedStateMachine):
    """Sequences arrive, compute as planned, and end; KV memory stays within its limit."""

    def __init__(self) -> None:
        super().__init__()
        self.running: list[Model] = []
        self.waiting: list[Model] = []
        self.keys = 0
        self.ended = 0

    @rule(prompt=st.integers(1, 600), output=st.integers(1, 600))
    def arrive(self, prompt: int, output: int) -> None:
        self.keys += 1
        self.waiting.append(Model(self.keys, prompt, min(output, LIMITS.kv_tokens - prompt)))

    @rule()
    @precondition(lambda self: self.running or self.waiting)
    def step(self) -> None:
        oldest = (*self.running, *self.waiting)[0].key
        plan = plan_step([s.view for s in self.running], [s.view for s in self.waiting], LIMITS, oldest)
        assert plan.work, "nothing to do although there is work"
        by_key = {s.key: s for s in (*self.running, *self.waiting)}
        assert list(plan.admitted) == [s.key for s in self.waiting[: len(plan.admitted)]]
        assert not (plan.admitted and plan.preempted)
        gone = [by_key[k] for k in plan.preempted]
        assert gone == self.running[len(self.running) - len(gone) :]
        for s in gone:
            s.computed = 0
            s.preemptions += 1
            assert s.preemptions <= MAX_PREEMPTIONS
        self.running = [s for s in self.running if s not in gone] + [by_key[k] for k in plan.admitted]
        self.waiting = gone + self.waiting[len(plan.admitted) :]
        for work in plan.work:
            s = by_key[work.key]
            assert s in self.running
            assert 0 < work.count <= s.length - s.computed
            s.computed += work.count
            if s.computed == s.length:
                s.length += 1
        over = [s for s in self.running if s.length - s.prompt >= s.output]
        self.running = [s for s in self.running if s not in over]
        self.ended += len(over)

    @invariant()
    def memory_is_bounded(self) -> None:
        assert sum(blocks_for(s.computed) for s in self.running) <= LIMITS.kv_blocks
        assert len(self.running) <= LIMITS.max_sequences

    def teardown(self) -> None:
        for _ in range(200_000):
            if not (self.running or self.waiting):
                break
            self.step()
        assert self.ended == self.keys, "not every sequence ended"


TestSteps = Steps.TestCase
TestSteps.settings = settings(max_examples=examples(25), stateful_step_count=40, deadline=None)
