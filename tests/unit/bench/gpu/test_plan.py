"""The plan of bench.gpu: steps, goals and choice."""

from __future__ import annotations

import importlib.util

import pytest

from bench.gpu.plan import BUDGET_S, STEPS, Goal, choose
from bench.gpu.rehearsal import REHEARSED, rehearse


def test_each_step_names_a_module_and_ends_within_the_budget() -> None:
    assert len({step.name for step in STEPS}) == len(STEPS)
    for step in STEPS:
        assert 0 < step.estimate_s <= step.limit_s <= BUDGET_S
        flag, module, *_ = step.arguments
        assert flag == "-m"
        assert importlib.util.find_spec(module) is not None, module


def test_files_are_needed_only_of_earlier_steps() -> None:
    earlier: set[str] = set()
    for step in STEPS:
        assert earlier.issuperset(step.needs_files_of), step.name
        earlier.add(step.name)


def test_a_command_has_the_paths_and_the_device() -> None:
    [_, step] = choose(["first_token"])
    command = step.command("/w/f.json", "/w", "cuda:3")
    assert command[command.index("--device") + 1] == "cuda:3"
    assert command[command.index("--models") + 1] == "/w/models"
    assert command[command.index("--json") + 1] == "/w/f.json"
    [copies] = choose(["copies"])
    command = copies.command("/w/f.json", "/w", "cuda:3")
    assert command[command.index("--devices") + 1] == "3"


def test_named_steps_bring_those_whose_files_they_need() -> None:
    assert [s.name for s in choose(["reuse", "tests"])] == ["tests", "models", "reuse"]
    assert choose() == STEPS


def test_unknown_step_is_an_error_that_lists_the_steps() -> None:
    with pytest.raises(KeyError, match=r"no step nothing; the steps are tests, copies"):
        choose(["nothing"])


@pytest.mark.parametrize(
    ("relation", "value", "met"),
    [(">=", 2.0, True), (">=", 1.9, False), ("<=", 2.0, True), ("<=", 2.1, False), ("==", 2.0, True), ("==", 0.0, False)],
)
def test_a_goal_is_met_at_its_value(relation: str, value: float, met: bool) -> None:
    goal = Goal("f", relation, 2.0, "two")  # type: ignore[arg-type]  # parametrized
    assert goal.is_met({"f": value}) is met
    assert goal.is_met({"g": value}) is None


def test_rehearsed_steps_run_the_same_modules_without_goals() -> None:
    steps = choose(REHEARSED)
    for step, rehearsed in zip(steps, rehearse(steps), strict=True):
        assert rehearsed.arguments[: len(step.arguments)] == step.arguments
        assert len(rehearsed.arguments) > len(step.arguments)
        assert rehearsed.goals == ()


def test_a_step_that_needs_a_gpu_is_not_rehearsed() -> None:
    with pytest.raises(KeyError, match="copies cannot be rehearsed"):
        rehearse(choose(["copies"]))
