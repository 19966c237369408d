"""Running the steps of bench.gpu: order, failures, limits, and the figures that are kept."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from bench.gpu.__main__ import exit_status
from bench.gpu.plan import Goal, Step
from bench.gpu.runner import NOTHING_MEASURED, Ended, Outcome, Processes, State, read_figures, run_steps

GOAL = Goal("speed", ">=", 2.0, "twice")
WRITE = "import sys, json; json.dump(dict(figures=dict(speed=3)), open(sys.argv[1], 'w')); "


def step(name: str, *, estimate_s: float = 10.0, needs: tuple[str, ...] = (), goals: tuple[Goal, ...] = ()) -> Step:
    return Step(name, "", (), estimate_s, goals=goals, needs_files_of=needs)


def run(
    steps: Sequence[Step], ended: Mapping[str, tuple[Ended, Mapping[str, float]]], within_s: float | None = None
) -> tuple[list[Outcome], list[str]]:
    """Run steps that each take their estimate; return the outcomes, and the steps that were run."""
    now, ran, reported = 0.0, list[str](), list[Outcome]()

    def one(step: Step) -> tuple[Ended, Mapping[str, float]]:
        nonlocal now
        now += step.estimate_s
        ran.append(step.name)
        return ended.get(step.name, (Ended(0, step.estimate_s), {"speed": 3.0}))

    outcomes = run_steps(steps, one, reported.append, within_s=within_s, clock=lambda: now)
    assert reported == outcomes
    return outcomes, ran


def test_a_failing_step_does_not_stop_the_rest() -> None:
    outcomes, ran = run([step("a"), step("b"), step("c")], {"b": (Ended(1, 5, "it broke"), {})})
    assert ran == ["a", "b", "c"]
    assert [o.state for o in outcomes] == [State.MEASURED, State.FAILED, State.MEASURED]
    assert outcomes[1].reason == "exit status 1: it broke"
    assert exit_status(outcomes) == 1


def test_a_step_without_its_files_is_left_out() -> None:
    outcomes, ran = run([step("files"), step("user", needs=("files",)), step("other")], {"files": (Ended(1, 5), {})})
    assert ran == ["files", "other"]
    assert outcomes[1].state is State.LEFT_OUT
    assert "files of files" in outcomes[1].reason


def test_steps_that_would_not_end_in_time_are_left_out_and_shorter_ones_run() -> None:
    outcomes, ran = run([step("a", estimate_s=60), step("long", estimate_s=60), step("short", estimate_s=30)], {}, within_s=100)
    assert ran == ["a", "short"]
    assert outcomes[1].reason == "40 s are left, and it is expected to take 60 s"


def test_figures_of_a_step_at_its_limit_are_reported() -> None:
    outcomes, _ = run([step("a", goals=(GOAL,))], {"a": (Ended(None, 600, "round 3"), {"speed": 1.0})})
    assert outcomes[0].state is State.TIMED_OUT
    assert outcomes[0].is_missed
    assert "MISSED: twice" in outcomes[0].line()
    assert "limit of 600 s: round 3" in outcomes[0].line()


@pytest.mark.parametrize(
    ("figures", "state", "reason"),
    [({}, State.FAILED, "no figures"), ({"other": 1.0}, State.FAILED, "not measured speed"), ({"speed": 2.0}, State.MEASURED, "")],
)
def test_a_step_has_to_measure_the_figures_of_its_goals(figures: dict[str, float], state: State, reason: str) -> None:
    outcomes, _ = run([step("a", goals=(GOAL,))], {"a": (Ended(0, 5), figures)})
    assert outcomes[0].state is state
    assert reason in outcomes[0].reason


def test_an_optional_figure_may_be_missing() -> None:
    goal = Goal("speed", ">=", 2.0, "twice", is_required=False)
    outcomes, _ = run([step("a", goals=(goal,))], {"a": (Ended(0, 5), {"other": 1.0})})
    assert outcomes[0].state is State.MEASURED
    assert not outcomes[0].is_missed


def test_without_a_device_the_status_is_2() -> None:
    outcomes, _ = run([step("a"), step("b")], {n: (Ended(NOTHING_MEASURED, 1, "there is no GPU"), {}) for n in "ab"})
    assert {o.state for o in outcomes} == {State.NO_DEVICE}
    assert exit_status(outcomes) == NOTHING_MEASURED
    assert exit_status(run([step("a")], {})[0]) == 0


def processes(tmp_path: Path) -> Processes:
    work = tmp_path / "work"
    work.mkdir()
    return Processes(tmp_path / "figures", work, "cuda:0")


def python(code: str, limit_s: float = 60.0) -> Step:
    return Step("s", "", ("-c", code, "{json}"), 1.0, limit_s)


def test_figures_of_a_process_are_kept(tmp_path: Path) -> None:
    bed = processes(tmp_path)
    ended, figures = bed.run(python(WRITE + "print('first'); print('done')"))
    assert (ended.status, ended.last_line) == (0, "done")
    assert figures == {"speed": 3.0}
    assert json.loads((bed.figures / "gpu_s.json").read_text()) == {"figures": {"speed": 3}}
    assert (bed.work / "s.log").read_text() == "first\ndone\n"


def test_figures_of_an_earlier_run_are_not_taken_for_new_ones(tmp_path: Path) -> None:
    bed = processes(tmp_path)
    bed.run(python(WRITE))
    ended, figures = bed.run(python("raise SystemExit('it broke')"))
    assert (ended.status, ended.last_line, figures) == (1, "it broke", {})
    assert (bed.figures / "gpu_s.json").exists(), "the earlier file stays"


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def eventually(condition: Callable[[], bool]) -> bool:
    until = time.monotonic() + 60
    while not condition() and time.monotonic() < until:
        time.sleep(0.02)
    return condition()


def test_a_process_is_ended_at_its_limit_with_its_children(tmp_path: Path) -> None:
    bed = processes(tmp_path)
    code = (
        WRITE + "import subprocess; child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']); "
        "print(child.pid, flush=True); child.wait()"
    )
    began = time.monotonic()
    ended, figures = bed.run(python(code, limit_s=6.0))
    assert ended.status is None
    assert figures == {"speed": 3.0}, "what was written before counts"
    child = int((bed.work / "s.log").read_text().split()[0])
    try:
        assert eventually(lambda: not is_alive(child))
    finally:
        if is_alive(child):
            os.kill(child, signal.SIGKILL)
    assert time.monotonic() - began < 60


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"figures": 3}', '{"figures": {"a": "x"}}'])
def test_a_file_without_figures_has_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "f.json").write_text(text)
    assert read_figures(tmp_path / "f.json") == {}
