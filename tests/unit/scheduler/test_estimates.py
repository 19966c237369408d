"""What a start teaches about the next one."""

from __future__ import annotations

from services.scheduler.domain.estimates import learned
from shared.contracts.phases import NEW_ZYGOTE, Phase, PhaseSpan


def span(phase: Phase, ms: float, **detail: str) -> PhaseSpan:
    return PhaseSpan(phase=phase, start_ms=0, duration_ms=ms, detail=dict(detail))


def test_a_zygotes_own_start_is_paid_once() -> None:
    """The first engine of a node waits for its zygote's imports; the next ones do not."""
    first = learned(None, "a", "n", (span(Phase.CONTAINER, 9000, launcher=NEW_ZYGOTE), span(Phase.INIT, 80)), False)
    assert first.phases == {"init": 80.0}
    then = learned(first, "a", "n", (span(Phase.CONTAINER, 30, launcher="zygote"), span(Phase.INIT, 80)), False)
    assert then.phases == {"container": 30.0, "init": 80.0}


def test_waiting_and_reading_from_memory_say_nothing() -> None:
    spans = (span(Phase.RESERVE, 500), span(Phase.LOAD, 1), span(Phase.PROFILE, 100))
    assert learned(None, "a", "n", spans, True).phases == {"profile": 100.0}
