"""Torpor Fig. 10: functions that comply, Torpor beside Native and INFless-KA."""

from __future__ import annotations

from itertools import pairwise
from random import Random

from bench.papers import torpor as t
from bench.papers.constants import torpor as c
from bench.papers.core import Options, Result
from bench.papers.traffic import bursts
from simulator.policies import baselines
from simulator.policies.baselines import infless_keep

NAME = "torpor-fig10"
FUNCTIONS = 160


def run(options: Options) -> Result:
    result = Result(NAME, "160 functions on four V100")
    seconds = options.seconds(c.DURATION_S.value)
    result.measure_cases([t.case(FUNCTIONS, p, seconds) for p in (t.VARIANTS[0], baselines.NATIVE)], options, t.measure)
    result.measure_cases([t.case(FUNCTIONS, baselines.INFLESS_KA, seconds, keep_s=keep_alive(seconds))], options, t.measure)
    ours, native, infless = (result.row(policy=p) for p in ("torpor", "native", "infless-ka"))
    for row, executed, compliant in ((ours, 160, 160), (native, c.NATIVE_OF_160, None), (infless, 112, 7)):
        name = row.label["policy"]
        row.paper["executed"] = executed
        text = f"functions that {name} executes, of {FUNCTIONS}"
        if executed == FUNCTIONS:
            result.at_least("7.3, Fig. 10", text, row["executed"], executed)
        else:
            result.number("7.3, Fig. 10", text, row["executed"], executed)
        if compliant is not None:
            row.paper["compliant"] = compliant
            text = f"functions of {name} that comply, of {FUNCTIONS}"
            if compliant == FUNCTIONS:
                result.at_least("7.3, Fig. 10", text, row["compliant"], compliant)
            else:
                result.number("7.3, Fig. 10", text, row["compliant"], compliant)
    result.notes.append("Native's memory for each function is Table 1's (1.6 and 2.4 GB), not fitted to its 72 functions.")
    result.notes.append("Requests generated: Poisson, 5 to 30 a minute, uniform over the functions.")
    if options.sensitivity:
        for cv in (0.5, 1.5):
            part = Result("", "")
            part.measure_cases([t.case(FUNCTIONS, t.VARIANTS[0], seconds, cv=cv)], options.few, t.measure)
            result.notes.append(f"Sensitivity, arrivals with CV {cv}: Torpor's functions that comply {part.rows[0]['compliant']}.")
        for factor in (0.5, 1.5):
            part = Result("", "")
            part.measure_cases([t.case(FUNCTIONS, t.VARIANTS[0], seconds, nvlink=c.NVLINK.value * factor)], options.few, t.measure)
            result.notes.append(f"Sensitivity, NVLink x {factor}: Torpor's functions that comply {part.rows[0]['compliant']}.")
    return result


def keep_alive(seconds: float) -> float:
    """Return INFless-KA's lifespan from the function's past.

    It is the tail of the gaps between requests of a function of the mean rate.
    """
    rate = (c.RATE_LOW.value + c.RATE_HIGH.value) / 2 / 60
    times = bursts(rate, 100 / rate, 1.0, Random("infless"))
    return infless_keep([], [b - a for a, b in pairwise(times)], seconds)
