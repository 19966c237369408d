"""ServerlessLLM Fig. 10: start-up latency of whole systems by model and data set."""

from __future__ import annotations

from bench.papers import serverlessllm as s
from bench.papers.constants import serverlessllm as c
from bench.papers.core import Options, Result, estimate

NAME = "serverlessllm-fig10"
RATE = 0.5
"""The paper does not state the rate of this figure; by section 7.4 Ray Serve's latency rises beyond
0.5.
"""
MEANS = {
    ("OPT-6.7B", "GSM8K"): {"ServerlessLLM": 0.8, "Ray Serve": 12.1, "Ray Serve with cache": 8.2},
    ("OPT-30B", "GSM8K"): {"ServerlessLLM": 7.5, "Ray Serve": 213.0, "Ray Serve with cache": 199.2},
    ("OPT-6.7B", "ShareGPT"): {"ServerlessLLM": 0.8, "Ray Serve": 182.2, "Ray Serve with cache": 162.4},
    ("OPT-13B", "ShareGPT"): {"ServerlessLLM": 1.6},
    ("OPT-30B", "ShareGPT"): {"ServerlessLLM": 89.9, "Ray Serve with cache": 261.8},
}
"""Section 7.4. For "models like 6.7B and 13B" on ShareGPT it gives one figure for each baseline;
read here as OPT-6.7B's.
"""


def run(options: Options) -> Result:
    result = Result(NAME, "start-up latency of serving systems (seconds)")
    seconds = options.seconds(c.DURATION_S.value)
    cases = (s.build_case(x, m, d, RATE, seconds) for d in c.DATASETS for m in c.COPIES for x in s.SYSTEMS)
    result.measure_cases(cases, options, s.measure)
    for (model, dataset), means in MEANS.items():
        for system, stated in means.items():
            row = result.row(model=model, dataset=dataset, system=system)
            row.paper["mean_s"] = stated
            result.number("7.4, Fig. 10", f"{model}, {dataset}: mean of {system}", row["mean_s"], stated)
    for system, stated in (("ServerlessLLM", 0.89), ("Ray Serve with cache", 0.26)):
        row = result.row(model="OPT-30B", dataset="GSM8K", system=system)
        lost = estimate(1 - r["served_share"] for r in row.runs)
        result.share("7.4", f"OPT-30B: not served within 300 s by {system} (GSM8K)", lost, 1 - stated)
    fast = Result("", "")
    fast.measure_cases(
        [s.build_case("Ray Serve", "OPT-6.7B", "GSM8K", RATE, seconds, network=c.FAST_NETWORK.value)], options, s.measure
    )
    result.number("7.4", "OPT-6.7B, GSM8K: mean of Ray Serve with 100 Gbps", fast.rows[0]["mean_s"], 3.8)
    result.notes.append(f"The rate is not stated; {RATE} requests per second here.")
    if options.sensitivity:
        for rate in (RATE / 2, RATE * 1.5):
            part = Result("", "")
            part.measure_cases((s.build_case(x, "OPT-6.7B", "GSM8K", rate, seconds) for x in s.SYSTEMS), options.few, s.measure)
            means_ = ", ".join(f"{x} {part.row(system=x)['mean_s']}" for x in s.SYSTEMS)
            result.notes.append(f"Sensitivity, {rate:g} requests per second, OPT-6.7B on GSM8K, mean: {means_}.")
    return result
