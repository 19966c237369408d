"""Steps of one token use the number of threads that is measured to be faster.

No logits depend on it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from services.engine.domain.thread_choice import FIRST_STEPS, LEAST_PAIRS, MOST_STEPS, PAIRS, ThreadChoice
from services.engine.generation.step_threads import StepThreads

FULL = 4


def run(choice: ThreadChoice, steps: int, duration: Callable[[int], float]) -> list[int]:
    """Run steps, and return the number of threads of each."""
    used = []
    for _ in range(steps):
        used.append(choice.pick())
        choice.record(used[-1], duration(used[-1]))
    return used


def steps_until_trial(choice: ThreadChoice, duration: Callable[[int], float]) -> int:
    """Run steps with the chosen number, until one with the other number is next."""
    for count in range(3 * MOST_STEPS):
        if choice.pick() != choice.chosen:
            return count
        choice.record(choice.chosen, duration(choice.chosen))
    raise AssertionError("no trial began")


def test_all_threads_are_used_until_the_first_trial_which_compares_both() -> None:
    used = run(ThreadChoice(FULL), FIRST_STEPS + 2 * PAIRS, lambda n: 1.0)
    assert set(used[:FIRST_STEPS]) == {FULL}
    assert used[FIRST_STEPS:].count(1) == used[FIRST_STEPS:].count(FULL) == PAIRS


@pytest.mark.parametrize(("single", "full", "chosen"), [(1.0, 1.2, 1), (1.0, 1.0, 1), (1.02, 1.0, 1), (1.05, 1.0, FULL)])
def test_one_thread_is_chosen_unless_all_are_clearly_faster(single: float, full: float, chosen: int) -> None:
    choice = ThreadChoice(FULL)
    run(choice, FIRST_STEPS + 2 * PAIRS, lambda n: single if n == 1 else full)
    assert choice.chosen == chosen
    assert set(run(choice, FIRST_STEPS, lambda n: 1.0)) == {chosen}


def test_a_few_late_steps_do_not_decide() -> None:
    times = iter([1.0, 9.0, 1.0, 1.0, 9.0, 1.0] + [1.0] * 100)  # both numbers have one late step of three

    def duration(n: int) -> float:
        return next(times) * (1.0 if n == 1 else 0.7)

    choice = ThreadChoice(FULL)
    run(choice, FIRST_STEPS, lambda n: 1.0)
    run(choice, 2 * PAIRS, duration)
    assert choice.chosen == FULL


def test_a_trial_ends_at_once_if_one_thread_is_far_slower() -> None:
    choice = ThreadChoice(FULL)
    used = run(choice, FIRST_STEPS + 2 * PAIRS, lambda n: 8.0 if n == 1 else 1.0)
    assert used.count(1) == LEAST_PAIRS
    assert choice.chosen == FULL


def test_trials_become_rarer_while_they_confirm_the_choice() -> None:
    def duration(n: int) -> float:
        return 1.0 if n == 1 else 1.5

    choice = ThreadChoice(FULL)
    run(choice, FIRST_STEPS + 2 * PAIRS, duration)
    waits = []
    for _ in range(9):
        waits.append(steps_until_trial(choice, duration))
        run(choice, 2 * PAIRS, duration)
    assert waits == sorted(waits)
    assert waits[0] < waits[-1]
    assert all(MOST_STEPS <= wait <= MOST_STEPS + 1 for wait in waits[-2:]), "but not ever rarer"


def test_a_later_trial_changes_the_choice_when_the_machine_has_changed() -> None:
    choice = ThreadChoice(FULL)
    run(choice, FIRST_STEPS + 2 * PAIRS, lambda n: 1.0 if n == 1 else 1.5)
    assert choice.chosen == 1
    steps_until_trial(choice, lambda n: 1.0)
    run(choice, 2 * PAIRS, lambda n: 1.0 if n == 1 else 0.6)
    assert choice.chosen == FULL
    assert steps_until_trial(choice, lambda n: 1.0) <= FIRST_STEPS + 1, "the next trial is soon"


@pytest.fixture
def threads() -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(FULL)
    yield FULL
    torch.set_num_threads(before)


def test_only_steps_of_one_token_on_the_cpu_change_the_threads(threads: int) -> None:
    def used(found: StepThreads, tokens: int) -> set[int]:
        numbers = set()
        for _ in range(FIRST_STEPS + 2 * PAIRS):
            with found.for_step(tokens):
                numbers.add(torch.get_num_threads())
            assert torch.get_num_threads() == threads
        return numbers

    cpu = StepThreads(torch.device("cpu"))
    assert used(cpu, 2) == {threads}
    assert used(cpu, 1) == {1, threads}
    assert used(StepThreads(torch.device("cuda")), 1) == {threads}


def test_the_threads_are_set_back_after_a_step_that_fails(threads: int) -> None:
    found = StepThreads(torch.device("cpu"))
    for _ in range(2 * FIRST_STEPS):
        with pytest.raises(RuntimeError), found.for_step(1):
            raise RuntimeError
        assert torch.get_num_threads() == threads


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(160, 64), (640, 640), (1728, 640), (640, 1728), (8192, 640), (1024, 4096), (128, 8192)])
def test_products_with_one_row_do_not_depend_on_the_threads(shape: tuple[int, int], dtype: torch.dtype, threads: int) -> None:
    torch.manual_seed(0)
    weight, row = torch.randn(shape).to(dtype), torch.randn(1, 1, shape[1]).to(dtype)
    found = []
    for number in (1, 2, 3, threads):
        torch.set_num_threads(number)
        found.append(torch.nn.functional.linear(row, weight))
    assert all(torch.equal(found[0], other) for other in found[1:])
