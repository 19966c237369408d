"""Torpor Fig. 14: a cluster of six nodes.

Torpor is compared with Native, NonSwap and SimpleSwap.
"""

from __future__ import annotations

from bench.papers import torpor as t
from bench.papers.constants import torpor as c
from bench.papers.core import Options, Result
from simulator.policies import baselines

NAME = "torpor-fig14"
FUNCTIONS = 1000
DEADLINES = (0.15, 0.25)
"""Section 7.4, seconds: vision models, Bert-qa."""


def run(options: Options) -> Result:
    result = Result(NAME, "six nodes: functions that comply, and how even the devices' loads are")
    seconds = options.seconds(c.DURATION_S.value)
    policies = (t.VARIANTS[0], t.SIMPLE, t.NONSWAP, baselines.NATIVE)
    nodes = int(c.NODES.value)
    result.measure_cases((t.case(FUNCTIONS, p, seconds, *DEADLINES, nodes=nodes) for p in policies), options, t.measure)
    ours, simple, nonswap, native = (result.row(policy=p.name) for p in policies)
    full = ours["compliant_share"]
    result.at_least("7.4, Fig. 14a", "Torpor meets the objectives of all of 1,000 functions (99 % of them)", full, 0.99)
    executed = native["executed"]
    result.number("7.4, Fig. 14a", "Native supports up to 500 functions", executed, 500)
    for row in (simple, nonswap, native):
        less = row.divide_by(ours, "compliant_share")
        result.claim_below("7.4, Fig. 14a", f"{row.label['policy']} is below Torpor (1,000; ratio of shares)", less)
    for row in (ours, simple):
        less = row.divide_by(nonswap, "load_variance")
        result.at_most("7.4, Fig. 14b", f"{row.label['policy']}: far less load variance than NonSwap (ratio; half)", less, 0.5)
    return result
