"""Torpor Fig. 16: FIFO and SLO-aware queueing over deadlines."""

from __future__ import annotations

from bench.papers import torpor as t
from bench.papers.constants import torpor as c
from bench.papers.core import Options, Result

NAME = "torpor-fig16"
DEADLINES = (0.06, 0.07, 0.08)
FUNCTIONS = 560
"""Not stated; the most of Fig. 11, where queueing matters."""


def run(options: Options) -> Result:
    result = Result(NAME, "FIFO and SLO-aware queueing, deadlines of 60 to 80 ms")
    seconds = options.seconds(c.DURATION_S.value / 4)
    policies = (t.VARIANTS[0], t.VARIANTS[1])
    result.measured((t.case(FUNCTIONS, p, seconds, deadline) for deadline in DEADLINES for p in policies), options, t.measure)
    for deadline in DEADLINES:
        ms = str(round(deadline * 1e3))
        aware, fifo = (result.row(deadline_ms=ms, policy=p.name)["compliant_share"] for p in policies)
        result.order("A.3, Fig. 16", f"{ms} ms: SLO-aware queueing above FIFO (plot only)", aware, aware.mean > fifo.mean)
    return result
