"""Torpor Fig. 11: the gain of each of its policies, by functions on one node."""

from __future__ import annotations

from bench.papers import torpor as t
from bench.papers.constants import torpor as c
from bench.papers.core import Case, Options, Result

NAME = "torpor-fig11"
FEW, MANY = 480, 560
"""Section 1 says 480, section 7.3 "even with 560 functions"; the other points are plot only."""
OVERLOADED = ("torpor-random", "torpor-lru")
"""Policies whose queues grow as long as requests arrive: a longer run only lowers their share."""


def cases(options: Options) -> list[Case]:
    seconds = options.seconds(c.DURATION_S.value)
    lengths = {p.name: seconds / 4 if p.name in OVERLOADED else seconds for p in t.VARIANTS}
    return [t.case(FEW, t.VARIANTS[0], seconds), *(t.case(MANY, p, lengths[p.name]) for p in t.VARIANTS)]


def run(options: Options) -> Result:
    result = Result(NAME, "share of functions that comply, by policy")
    result.measure_cases(cases(options), options, t.measure)
    few = result.row(functions=str(FEW), policy="torpor")["compliant_share"]
    result.at_least("1", "Torpor meets the objectives of all of 480 functions on four GPUs (99 % of them)", few, 0.99)
    rows = {v.name: result.row(functions=str(MANY), policy=v.name) for v in t.VARIANTS}
    whole = rows.pop("torpor")
    share = whole["compliant_share"]
    result.at_least("7.3, Fig. 11", "over 80 % of 560 functions comply with the whole of Torpor", share, 0.8)
    for name, row in rows.items():
        less = row.divide_by(whole, "compliant_share")
        result.claim_below("7.3, Fig. 11", f"{name} is below the whole of Torpor (560; ratio of shares)", less)
    random = rows.pop("torpor-random")
    nearest = min(rows.values(), key=lambda r: r["compliant_share"].mean)
    worst = random.divide_by(nearest, "compliant_share")
    result.claim_below("7.3, Fig. 11", f"torpor-random is the worst (over the next, {nearest.label['policy']})", worst)
    result.notes.append(
        "Torpor-Block is not here: it is about the time that CUDA's allocator takes, which the simulator has no model of."
    )
    result.notes.append(
        f"Runs of {options.seconds(c.DURATION_S.value):g} s of requests; {' and '.join(OVERLOADED)} a quarter as long: "
        "their queues grow as long as requests arrive."
    )
    return result
