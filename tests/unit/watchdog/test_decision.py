"""Silences that count as a hang, and those of a slow machine or watcher."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.watchdog.decision import LONGEST_STEP_S, Limits, Observation, Watch, describe, is_hung, observe

LIMITS = Limits(loop_s=10.0, outside_loop_s=60.0)


def silent(
    seconds: Iterable[float], state: str = "S", waited: float = 0.0, beats: int = 5, is_loop_running: bool = True
) -> list[Observation]:
    """Return observations after each of `seconds` without a heartbeat.

    Args:
        waited: The part of that time spent waiting for a processor.
    """
    return [Observation(at, beats, is_loop_running, state, at * waited) for at in seconds]


def play(observations: Iterable[Observation]) -> Watch:
    watch = None
    for observation in observations:
        watch = observe(watch, observation)
    assert watch is not None
    return watch


def hung_at(observations: Iterable[Observation], limits: Limits = LIMITS) -> float | None:
    watch = None
    for observation in observations:
        watch = observe(watch, observation)
        if is_hung(watch, limits):
            return observation.at
    return None


@pytest.mark.parametrize("state", ["S", "R", "T"])
def test_ten_seconds_without_a_heartbeat_are_a_hang(state: str) -> None:
    assert hung_at(silent(range(30), state)) == 10


def test_a_heartbeat_restarts_the_count() -> None:
    observations = [*silent(range(10)), *silent(range(10, 19), beats=6), *silent(range(19, 40), beats=7)]
    assert hung_at(observations) == 29


def test_watcher_that_did_not_run_reports_no_hang() -> None:
    """A watcher that did not run reports no false hang.

    An hour of a sleeping laptop, or a stopped process tree, counts as the longest step only.
    """
    assert play(silent([0, 3600])).silent_s == LONGEST_STEP_S
    assert hung_at(silent([0, 1, 3601, 3602])) is None


@pytest.mark.parametrize("state", ["D", "t", "Z"])
def test_process_in_disk_wait_or_under_a_debugger_is_not_hung(state: str) -> None:
    assert hung_at(silent(range(1000), state)) is None


def test_process_without_cpu_time_is_slow_and_not_hung() -> None:
    assert hung_at(silent(range(1000), "R", waited=1.0)) is None
    assert hung_at(silent(range(1000), "R", waited=0.75)) == 40


def test_observation_without_kernel_state_is_not_counted() -> None:
    observations = [Observation(0.0, 5, True), *silent(range(1, 20), "T")]
    assert hung_at(observations) == 11


def test_limit_is_longer_before_and_after_the_event_loop_runs() -> None:
    assert hung_at(silent(range(100), beats=0, is_loop_running=False)) == 60
    after = [*silent(range(5)), *silent(range(5, 100), is_loop_running=False)]
    assert hung_at(after) == 65


def test_limit_of_zero_disables_hang_detection() -> None:
    assert hung_at(silent(range(1000), "T"), Limits(0.0)) is None


def test_reason_names_the_silence_and_whether_the_process_is_stopped() -> None:
    assert describe(play(silent(range(12), "S"))) == "event loop made no progress for 11 s"
    assert describe(play(silent(range(12), "T"))) == "event loop made no progress for 11 s, the process is stopped"


@given(st.lists(st.tuples(st.floats(0, 100), st.booleans(), st.sampled_from("SRDTt"), st.floats(0, 5)), max_size=60))
def test_silence_never_exceeds_the_time_since_the_last_heartbeat(steps: list[tuple[float, bool, str, float]]) -> None:
    now, beats, waited, last_beat = 0.0, 0, 0.0, 0.0
    watch = observe(None, Observation(0.0, 0, True, "S", 0.0))
    for step, beat, state, wait in steps:
        now, waited = now + step, waited + wait
        if beat:
            beats, last_beat = beats + 1, now
        watch = observe(watch, Observation(now, beats, True, state, waited))
        assert 0.0 <= watch.silent_s <= now - last_beat + 1e-6
