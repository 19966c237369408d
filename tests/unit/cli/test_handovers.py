"""`thaw trace` of a request that several instances served.

It shows when each one responded, and how long the client waited between them.
"""

from __future__ import annotations

import io

from rich.console import Console

from shared.contracts.traces import HandoverTrace, RequestTrace
from thaw.cli.handovers import PAUSED, SERVED, handovers_chart, lanes

MOVE = HandoverTrace(
    kind="move", source_instance="i-1", instance_id="i-2", at_ms=410, since_ms=400, tokens=40, pause_ms=100, migration_id="m-1"
)
FAILOVER = HandoverTrace(
    kind="failover", source_instance="i-2", instance_id="i-3", at_ms=900, since_ms=600, tokens=60, pause_ms=400
)


def trace(*handovers: HandoverTrace, ttft: float | None = 50) -> RequestTrace:
    return RequestTrace(
        request_id="r",
        trace_id="t",
        model="m",
        endpoint="chat",
        received=0,
        ttft_ms=ttft,
        duration_ms=2_000,
        handovers=handovers,
    )


def shown(given: RequestTrace) -> str:
    console = Console(file=io.StringIO(), width=140)
    chart = handovers_chart(given, console)
    assert chart is not None
    console.print(chart)
    text: str = console.file.getvalue()  # type: ignore[attr-defined]  # it is the StringIO above
    return text


def test_each_instance_has_a_lane_that_starts_where_the_previous_one_ends() -> None:
    found = lanes(trace(MOVE, FAILOVER))
    assert [x.instance_id for x in found] == ["i-1", "i-2", "i-3"]
    assert [(x.from_ms, x.began_ms, x.end_ms) for x in found] == [(0, 50, 400), (400, 500, 600), (600, 1_000, 2_000)]


def test_handover_chart_shows_moves_failovers_and_pauses() -> None:
    lines = shown(trace(MOVE, FAILOVER)).splitlines()
    first, second, third = lines[2:5]
    assert first.split()[0] == "i-1"
    assert "move at 400 ms, 40 tokens, pause 100 ms  m-1" in second
    assert "failover at 600 ms, 60 tokens, pause 400 ms" in third
    assert third.count(SERVED) > second.count(SERVED) > 0
    assert third.count(PAUSED) > second.count(PAUSED) > 0
    assert "2.00 s in all" in lines[5]


def test_instance_that_sent_no_token_has_an_empty_lane() -> None:
    restarted = FAILOVER.model_copy(update={"since_ms": None, "tokens": 0, "source_instance": "i-1", "pause_ms": None})
    found = lanes(trace(restarted, ttft=None))
    assert [(x.instance_id, x.began_ms) for x in found] == [("i-1", None), ("i-3", None)]
    text = shown(trace(restarted, ttft=None))
    assert "failover, restarted, no token arrived" in text
    assert SERVED not in text.rsplit("\n", 2)[0]


def test_request_without_handover_has_no_lanes() -> None:
    assert lanes(trace()) == []
    assert handovers_chart(trace(), Console(file=io.StringIO())) is None
