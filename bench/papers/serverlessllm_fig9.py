"""ServerlessLLM Fig. 9: the three schedulers with larger models."""

from __future__ import annotations

from bench.papers import serverlessllm as s
from bench.papers.constants import serverlessllm as c
from bench.papers.core import Options, Result

NAME = "serverlessllm-fig9"
RATE = 0.2
"""The paper does not state it for this figure; at 0.2 OPT-30B on ShareGPT keeps its eight pairs of
GPUs busy.
"""


def run(options: Options) -> Result:
    result = Result(NAME, "start-up latency of larger models (seconds)")
    seconds = options.seconds(c.DURATION_S.value)
    models = ("OPT-13B", "OPT-30B")
    result.measure_cases(
        (s.case(m, d, RATE, p, seconds) for m in models for d in c.DATASETS for p in s.SCHEDULERS), options, s.measure
    )
    for model in models:
        share = result.row(model=model, dataset="GSM8K", policy="serverless-random")["ssd_share"]
        result.claim_within("7.3, Fig. 9", f"{model}, GSM8K: random loads from the SSD in 35 to 40 %", share, 0.35, 0.40)
    ours = result.row(model="OPT-30B", dataset="ShareGPT", policy="serverlessllm")
    for policy, stated in (("serverless-random", 0.65), ("shepherd", 0.55)):
        ratio = ours.divide_by(result.row(model="OPT-30B", dataset="ShareGPT", policy=policy), "p99_s")
        result.ratio("7.3, Fig. 9", f"OPT-30B, ShareGPT: ServerlessLLM's P99 over {policy}'s", ratio, stated)
    if options.sensitivity:
        for factor in (0.5, 1.5):
            part = Result("", "")
            part.measure_cases(
                (s.case("OPT-30B", "ShareGPT", RATE, p, seconds, slower=factor) for p in s.SCHEDULERS), options, s.measure
            )
            mine = part.row(policy="serverlessllm")
            ratios = ", ".join(f"{p.name} {mine.divide_by(part.row(policy=p.name), 'p99_s')}" for p in s.SCHEDULERS[1:])
            result.notes.append(f"Sensitivity, OPT-30B's inference time x {factor}: ServerlessLLM's P99 over others': {ratios}.")
    return result
