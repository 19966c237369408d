"""Spans keep their times when they move between the clocks of two processes."""

from shared.contracts.phases import Phase
from shared.telemetry.timeline import Timeline


class Clock:
    def __init__(self, now: float) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def test_spans_are_sent_relative_and_placed_at_their_receipt() -> None:
    theirs, mine = Clock(1000.0), Clock(5.0)
    sender, receiver = Timeline("loader", theirs), Timeline("gateway", mine)
    with sender.phase(Phase.LOAD, bytes=7):
        theirs.now += 0.25
    theirs.now += 0.5
    (sent,) = sender.spans()
    assert (round(sent.start_ms), round(sent.duration_ms), sent.detail) == (-750, 250, {"bytes": 7})

    receiver.absorb([sent])
    mine.now += 10
    (phase,) = receiver.spans(origin=4.0)
    assert (round(phase.start_ms), round(phase.duration_ms), phase.process) == (250, 250, "loader")


def test_open_phase_is_not_exported_and_a_second_end_has_no_effect() -> None:
    clock = Clock(0.0)
    timeline = Timeline("engine", clock)
    timeline.begin(Phase.INIT)
    assert timeline.spans() == ()
    clock.now = 1.0
    timeline.end(Phase.INIT, layers=2)
    timeline.end(Phase.INIT)
    assert [(s.phase, s.detail) for s in timeline.spans()] == [(Phase.INIT, {"layers": 2})]
