"""Torpor Fig. 11: the gain of each of its policies, by functions on one node."""

from __future__ import annotations

from bench.papers import torpor as t
from bench.papers.constants import torpor as c
from bench.papers.core import Options, Result

NAME = "torpor-fig11"
FUNCTIONS = (480, 560)
"""The paper says "even with 560 functions"; its other points are plot only."""


def run(options: Options) -> Result:
    result = Result(NAME, "share of functions that comply, by policy")
    seconds = options.seconds(c.DURATION_S.value / 4)
    result.measured((t.case(n, p, seconds) for n in FUNCTIONS for p in t.VARIANTS), options, t.measure)
    full = result.row(functions="560", policy="torpor")["compliant_share"]
    result.order("7.3, Fig. 11", "over 80 % of 560 functions comply with the whole of Torpor", full, full.mean > 0.8)
    full = result.row(functions="480", policy="torpor")["compliant_share"]
    result.number("1", "Torpor serves 480 functions on four GPUs within their objectives (share)", full, 1.0)
    for variant in t.VARIANTS[1:]:
        mine = result.row(functions="560", policy=variant.name)["compliant_share"]
        best = result.row(functions="560", policy="torpor")["compliant_share"]
        result.order("7.3, Fig. 11", f"{variant.name} is below the whole of Torpor (560)", mine, mine.mean < best.mean)
    shares = {v.name: result.row(functions="560", policy=v.name)["compliant_share"].mean for v in t.VARIANTS}
    worst = result.row(functions="560", policy="torpor-random")["compliant_share"]
    result.order("7.3, Fig. 11", "torpor-random is the worst", worst, shares["torpor-random"] == min(shares.values()))
    result.notes.append(
        "Torpor-Block is not here: it is about the time that CUDA's allocator takes, which the simulator has no model of."
    )
    result.notes.append(f"{seconds:g} s of requests: with fewer than 50 of a function a single late one makes it not comply.")
    return result
