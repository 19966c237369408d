"""ServerlessLLM Fig. 11: start-up latency of whole systems over the request rate."""

from __future__ import annotations

from bench.papers import serverlessllm as s
from bench.papers.constants import serverlessllm as c
from bench.papers.core import Options, Result, Row, estimate

NAME = "serverlessllm-fig11"
RATES = (0.2, 0.5, 0.8, 1.1, 1.4)


def run(options: Options) -> Result:
    result = Result(NAME, "start-up latency over the request rate, OPT-6.7B (seconds)")
    seconds = options.seconds(c.DURATION_S.value)
    cases = (s.build_case(x, "OPT-6.7B", d, r, seconds) for d in c.DATASETS for r in RATES for x in s.SYSTEMS)
    result.measure_cases(cases, options, s.measure)

    def at(dataset: str, rate: float, system: str = "ServerlessLLM") -> Row:
        return result.row(dataset=dataset, rps=f"{rate:g}", system=system)

    for rate in RATES:
        result.number("7.4, Fig. 11a", f"GSM8K, {rate:g}: ServerlessLLM about 1 s", at("GSM8K", rate)["mean_s"], 1.0)
    for system in s.SYSTEMS[1:]:
        rise = at("GSM8K", 1.1, system).divide_by(at("GSM8K", 0.5, system), "mean_s")
        result.claim_above("7.4, Fig. 11a", f"GSM8K: {system}'s latency rises beyond 0.5 (1.1 over 0.5)", rise)
    gains = [at("ShareGPT", r, x).divide_by(at("ShareGPT", r), "mean_s").mean for r in RATES[:-1] for x in s.SYSTEMS[1:]]
    result.ratio("7.4, Fig. 11b", "ShareGPT, 0.2 to 1.1: up to 212 times better", estimate([max(gains)]), 212)
    rise = at("ShareGPT", 1.4).divide_by(at("ShareGPT", 1.1), "mean_s")
    result.claim_above("7.4, Fig. 11b", "ShareGPT: ServerlessLLM's latency begins to rise at 1.4 (over 1.1)", rise)
    return result
