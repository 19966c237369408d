"""ServerlessLLM Fig. 8: start-up latency of three schedulers by request rate.

The model is OPT-6.7B, on GSM8K and ShareGPT.
"""

from __future__ import annotations

from bench.papers import serverlessllm as s
from bench.papers.constants import serverlessllm as c
from bench.papers.core import Options, Result, Row

NAME = "serverlessllm-fig8"
OMITTED = {"ssd": c.SSD, "pcie": c.PCIE, "pool": c.POOL_GB, "zipf": c.ZIPF}
RATES = (0.2, 0.8, 1.4)
"""Section 7.3 states 1.4 and "medium", which with 513 requests in 660 s is 0.8; the lowest is the
least of section 7.4.
"""


def run(options: Options) -> Result:
    result = Result(NAME, "start-up latency over the request rate, OPT-6.7B (seconds)")
    seconds = options.seconds(c.DURATION_S.value)
    cases = [s.case("OPT-6.7B", d, r, p, seconds) for d in ("GSM8K", "ShareGPT") for r in RATES for p in s.SCHEDULERS]
    result.measure_cases(cases, options, s.measure)
    claims(result)
    if options.sensitivity:
        sensitivity(result, options)
    result.notes += [
        "Workload generated: Gamma arrivals per model (CV 8), shares 1/n, as many requests as rate times 660 s.",
        "Loads, migrations and preemptions are for 1,000 requests; the paper's are of one run.",
    ]
    return result


def claims(result: Result) -> None:
    def at(dataset: str, rps: str, policy: str) -> Row:
        return result.row(dataset=dataset, rps=rps, policy=policy)

    low = at("GSM8K", "0.2", "serverless-random")
    result.share("7.3, Fig. 8a/d", "random: 40 % of loads come from the SSD", low["ssd_share"], 0.40)
    for dataset in ("GSM8K", "ShareGPT"):
        ratio = at(dataset, "0.2", "shepherd").divide_by(at(dataset, "0.2", "serverlessllm"), "p99_s")
        result.claim_alike("7.3, Fig. 8a/d", f"{dataset}, low: Shepherd* and ServerlessLLM are similar (P99 ratio)", ratio)
    medium = at("GSM8K", "0.8", "serverlessllm")
    ratio = at("GSM8K", "0.8", "serverless-random").divide_by(medium, "p99_s")
    result.ratio("7.3, Fig. 8b", "GSM8K, medium: random's P99 is 1.86 times as long", ratio, 1.86)
    result.claim_alike(
        "7.3, Fig. 8b", "GSM8K, medium: Shepherd* is similar (ratio)", at("GSM8K", "0.8", "shepherd").divide_by(medium, "p99_s")
    )
    medium = at("ShareGPT", "0.8", "serverlessllm")
    result.ratio(
        "7.3, Fig. 8e",
        "ShareGPT, medium: Shepherd*'s P99 is 2 times as long",
        at("ShareGPT", "0.8", "shepherd").divide_by(medium, "p99_s"),
        2.0,
    )
    result.number("7.3, Fig. 8e", "migrations of 1,000 requests (114 of 513)", medium["migrations"], 222)
    result.number("7.3, Fig. 8e", "preemptions of 1,000 requests (40 of 513)", at("ShareGPT", "0.8", "shepherd")["preemptions"], 78)
    high = at("GSM8K", "1.4", "serverlessllm")
    result.ratio(
        "7.3, Fig. 8c",
        "GSM8K, 1.4: Shepherd*'s P99 over ServerlessLLM's",
        at("GSM8K", "1.4", "shepherd").divide_by(high, "p99_s"),
        1.27,
    )
    result.ratio(
        "7.3, Fig. 8c",
        "GSM8K, 1.4: random's P99 over ServerlessLLM's",
        at("GSM8K", "1.4", "serverless-random").divide_by(high, "p99_s"),
        1.95,
    )
    result.number("7.3, Fig. 8c", "migrations of 1,000 requests (53 of 925)", high["migrations"], 57)
    result.number("7.3, Fig. 8c", "preemptions of 1,000 requests (9 of 925)", at("GSM8K", "1.4", "shepherd")["preemptions"], 10)
    result.ratio(
        "7.3, Fig. 8c", "Shepherd* reads the SSD twice as often", at("GSM8K", "1.4", "shepherd").divide_by(high, "ssd_loads"), 2.0
    )
    worst = at("ShareGPT", "1.4", "shepherd")
    for policy, stated in (("serverless-random", 1.43), ("serverlessllm", 1.5)):
        result.ratio(
            "7.3, Fig. 8f",
            f"ShareGPT, 1.4: Shepherd*'s P95 over {policy}'s",
            worst.divide_by(at("ShareGPT", "1.4", policy), "p95_s"),
            stated,
        )
    result.number(
        "7.3, Fig. 8f", "migrations of 1,000 requests (64 of 925)", at("ShareGPT", "1.4", "serverlessllm")["migrations"], 69
    )
    result.number("7.3, Fig. 8f", "preemptions of 1,000 requests (166 of 925)", worst["preemptions"], 179)


def sensitivity(result: Result, options: Options) -> None:
    """Return the ratio of Fig. 8e with each omitted constant varied.

    The constants that the paper omits are taken at half and one and a half of their values.
    """
    seconds = options.seconds(c.DURATION_S.value)
    changes = {f"{name} x {f}": {name: x.value * f} for name, x in OMITTED.items() for f in (0.5, 1.5)}
    for what, change in {**changes, "bursts kept whole": {"denser": 1.3}}.items():
        part = Result("", "")
        part.measure_cases(
            (s.case("OPT-6.7B", "ShareGPT", 0.8, p, seconds, **change) for p in s.SCHEDULERS), options.few, s.measure
        )
        ours = part.row(policy="serverlessllm")
        ratios = ", ".join(f"{p.name} {part.row(policy=p.name).divide_by(ours, 'p99_s')}" for p in s.SCHEDULERS[1:])
        result.notes.append(f"Sensitivity, ShareGPT at 0.8 RPS, {what}: ServerlessLLM's P99 {ours['p99_s']} s; over it {ratios}.")
