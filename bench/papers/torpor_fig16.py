"""Torpor Fig. 16: FIFO and SLO-aware queueing over deadlines."""

from __future__ import annotations

from bench.papers import torpor as t
from bench.papers.constants import torpor as c
from bench.papers.core import Options, Result

NAME = "torpor-fig16"
DEADLINES = (0.06, 0.07, 0.08)
FUNCTIONS = 560
KINDS = tuple(m for m in c.MODELS if m.name == "resnet-152")


def run(options: Options) -> Result:
    result = Result(NAME, "FIFO and SLO-aware queueing, 560 ResNet-152 functions, deadlines of 60 to 80 ms")
    seconds = options.seconds(c.DURATION_S.value)
    policies = (t.VARIANTS[0], t.VARIANTS[1])
    cases = (t.case(FUNCTIONS, p, seconds, deadline, kinds=KINDS) for deadline in DEADLINES for p in policies)
    result.measure_cases(cases, options, t.measure)
    for deadline in DEADLINES:
        ms = str(round(deadline * 1e3))
        aware, fifo = (result.row(deadline_ms=ms, policy=p.name) for p in policies)
        less = fifo.divide_by(aware, "compliant_share")
        result.claim_below("A.3, Fig. 16", f"{ms} ms: FIFO complies less than SLO-aware queueing (ratio)", less)
    result.notes.append("The request rates of this experiment are not stated; those of section 7.3 here.")
    return result
