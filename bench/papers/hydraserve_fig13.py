"""HydraServe Fig. 13: tokens' time and memory, relative to serverless vLLM.

The same runs give Fig. 11's applications.
"""

from __future__ import annotations

from bench.papers import hydraserve as h
from bench.papers.constants import hydraserve as c
from bench.papers.core import Options, Result

NAME = "hydraserve-fig13"
FIG11 = {"serverless-vllm": (51.8, 45.0, 91.5), "serverlessllm": (60.6, 48.1, 99.6), "hydraserve": (83.5, 76.6, 97.3)}
"""Artifact, ae_scripts/figure11.py: chatbot, code, summarization, in percent."""


def run(options: Options) -> Result:
    result = Result(NAME, "CV 8, 0.6 RPS: TPOT and cost relative to serverless vLLM; attainment by application")
    seconds = options.seconds(c.DURATION_S.value)
    result.measure_cases((h.end_to_end(p, 8, 0.6, seconds) for p in h.SYSTEMS), options, h.measure)
    ours, vllm = result.row(policy="hydraserve"), result.row(policy="serverless-vllm")
    result.ratio("8.3, Fig. 13a", "TPOT over serverless vLLM's", ours.divide_by(vllm, "mean_tpot_ms"), 1.06)
    result.ratio("8.3, Fig. 13b", "cost (memory x time): serverless vLLM's over ours", vllm.divide_by(ours, "cost_gb_s"), 1.12)
    for name, shares in FIG11.items():
        row = result.row(policy=name)
        for application, share in zip(("chatbot", "code", "summarization"), shares, strict=True):
            row.paper[application] = share
            result.share("artifact, Fig. 11", f"{application}: {name}, percent", row[application], share, 100)
    if options.sensitivity:
        literal = Result("", "")
        literal.measure_cases((h.end_to_end(p, 8, 0.6, seconds, table3=True) for p in h.SYSTEMS), options.few, h.measure)
        found = ", ".join(f"{r.label['policy']} {r['summarization']}" for r in literal.rows)
        result.notes.append(f"With summarization's objectives as Table 3 has them (15 s, 24 s), percent in time: {found}.")
        for factor in (0.5, 1.5):
            part = Result("", "")
            gather = c.GATHER.value * factor
            part.measure_cases([h.end_to_end(h.HYDRA, 8, 0.6, seconds, gather=gather)], options.few, h.measure)
            result.notes.append(f"Sensitivity, gathering KV blocks at x {factor}: mean TPOT {part.rows[0]['mean_tpot_ms']} ms.")
    return result
