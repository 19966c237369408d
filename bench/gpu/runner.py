"""Run the steps of a plan, each in a process with a limit; a failure does not stop the rest."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from bench.gpu.plan import Step

NOTHING_MEASURED = 2
"""Exit status of a benchmark without the device that it needs."""
_KILL_AFTER_S = 15.0
"""Seconds that a step has to stop its mesh after it was terminated."""
_TAIL_BYTES = 4096


class State(StrEnum):
    """How a step ended."""

    MEASURED = "measured"
    FAILED = "failed"
    TIMED_OUT = "timed out"
    NO_DEVICE = "no device"
    LEFT_OUT = "left out"


@dataclass(frozen=True)
class Ended:
    """The end of a step's process.

    Attributes:
        status: Exit status; None: it was ended at its limit.
        last_line: Of its output.
    """

    status: int | None
    seconds: float
    last_line: str = ""


@dataclass(frozen=True)
class Outcome:
    """The result of one step.

    Attributes:
        figures: As in its JSON file; also of a step that failed after it had written some.
        reason: Why nothing, or not all, was measured.
    """

    step: Step
    state: State
    seconds: float = 0.0
    figures: Mapping[str, float] = field(default_factory=dict)
    reason: str = ""

    @property
    def is_missed(self) -> bool:
        """True if a goal was measured and is not met."""
        return any(goal.is_met(self.figures) is False for goal in self.step.goals)

    def line(self) -> str:
        """Return the step's report in one line."""
        figures = [f"{name} {value:.4g}" for name in self.step.headline if (value := self.figures.get(name)) is not None]
        for goal in self.step.goals:
            met = goal.is_met(self.figures)
            if met is not None:
                figures.append(f"{goal.figure} {self.figures[goal.figure]:.4g} ({'met' if met else 'MISSED'}: {goal.text})")
        found = "; ".join([*figures, *([self.reason] if self.reason else [])])
        return f"{self.step.name}: {self.state} in {self.seconds:.0f} s{': ' if found else ''}{found}"


Run = Callable[[Step], tuple[Ended, Mapping[str, float]]]
"""Runs a step; returns its end and the figures that it has written."""


def run_steps(
    steps: Sequence[Step],
    run: Run,
    report: Callable[[Outcome], None],
    *,
    within_s: float | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> list[Outcome]:
    """Run the steps in order, and report each when it has ended.

    A step whose files another step should have written is left out if that one failed. A step that
    is not expected to end within the time is left out too, so that shorter ones may still run.

    Args:
        within_s: Seconds for all steps together; None: no limit.
    """
    began, outcomes = clock(), list[Outcome]()
    for step in steps:
        if (reason := _reason_to_leave_out(step, outcomes, within_s, clock() - began)) is not None:
            outcome = Outcome(step, State.LEFT_OUT, reason=reason)
        else:
            outcome = _judge(step, *run(step))
        outcomes.append(outcome)
        report(outcome)
    return outcomes


def _reason_to_leave_out(step: Step, before: Sequence[Outcome], within_s: float | None, passed_s: float) -> str | None:
    states = {outcome.step.name: outcome.state for outcome in before}
    if missing := [name for name in step.needs_files_of if states.get(name) is not State.MEASURED]:
        return f"it needs the files of {', '.join(missing)}"
    if within_s is not None and passed_s + step.estimate_s > within_s:
        return f"{max(0.0, within_s - passed_s):.0f} s are left, and it is expected to take {step.estimate_s:.0f} s"
    return None


def _judge(step: Step, ended: Ended, figures: Mapping[str, float]) -> Outcome:
    if ended.status is None:
        return Outcome(
            step, State.TIMED_OUT, ended.seconds, figures, f"ended at its limit of {step.limit_s:.0f} s: {ended.last_line}"
        )
    if ended.status == NOTHING_MEASURED and not figures:
        return Outcome(step, State.NO_DEVICE, ended.seconds, figures, ended.last_line)
    if ended.status != 0:
        return Outcome(step, State.FAILED, ended.seconds, figures, f"exit status {ended.status}: {ended.last_line}")
    if not figures:
        return Outcome(step, State.FAILED, ended.seconds, figures, f"it has written no figures: {ended.last_line}")
    if lacking := [goal.figure for goal in step.goals if goal.is_required and goal.figure not in figures]:
        return Outcome(step, State.FAILED, ended.seconds, figures, f"it has not measured {', '.join(lacking)}: {ended.last_line}")
    return Outcome(step, State.MEASURED, ended.seconds, figures)


@dataclass(frozen=True)
class Processes:
    """Runs steps as processes.

    Attributes:
        figures: Directory of the JSON files, `gpu_STEP.json`.
        work: Directory that the steps share, and of their logs.
        device: The device, such as `cuda:0`.
    """

    figures: Path
    work: Path
    device: str

    def run(self, step: Step) -> tuple[Ended, Mapping[str, float]]:
        """Run a step to its end or limit, then end all processes of its session."""
        draft = self.work / f"{step.name}.json"
        draft.unlink(missing_ok=True)
        ended = self._run(step, step.command(str(draft), str(self.work), self.device), self.work / f"{step.name}.log")
        figures = read_figures(draft)
        if figures:
            self.figures.mkdir(parents=True, exist_ok=True)
            (self.figures / f"gpu_{step.name}.json").write_bytes(draft.read_bytes())
        return ended, figures

    def _run(self, step: Step, command: list[str], log: Path) -> Ended:
        began = time.monotonic()
        with log.open("wb") as out:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True)
            try:
                status: int | None = process.wait(step.limit_s)
            except subprocess.TimeoutExpired:
                status = None
            finally:
                _end(process)
        return Ended(status, time.monotonic() - began, _last_line(log))


def _end(process: subprocess.Popen[bytes]) -> None:
    """Interrupt the step, so that it stops what it has started, then kill its group."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_KILL_AFTER_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _last_line(log: Path) -> str:
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - _TAIL_BYTES))
        lines = file.read().decode(errors="replace").strip().splitlines()
    return lines[-1].strip() if lines else ""


def read_figures(path: Path) -> dict[str, float]:
    """Return the figures of a file of `bench.report.write`; none if it is no such file."""
    try:
        found = json.loads(path.read_text())["figures"]
        return {str(name): float(value) for name, value in found.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}
