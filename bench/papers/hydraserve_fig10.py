"""HydraServe Fig. 10: TTFT attainment with tighter and looser objectives."""

from __future__ import annotations

from bench.papers import hydraserve as h
from bench.papers.constants import hydraserve as c
from bench.papers.core import Options, Result

NAME = "hydraserve-fig10"
SCALES = (0.5, 1.0, 1.5, 2.0)
"""The scales of the figure are plot only."""
RATE = 0.6


def run(options: Options) -> Result:
    result = Result(NAME, "TTFT attainment over the scale of the objectives (percent), CV 8")
    seconds = options.seconds(c.DURATION_S.value)
    result.measure_cases((h.end_to_end(p, 8, RATE, seconds, s) for s in SCALES for p in h.SYSTEMS), options, h.measure)
    rows = {(s, p.name): result.row(slo=f"{s:g}", policy=p.name) for s in SCALES for p in h.SYSTEMS}
    for name in ("serverless-vllm", "serverlessllm", "hydraserve"):
        tight = rows[0.5, name]["attainment"]
        result.at_most("8.3, Fig. 10a", f"tight objectives: {name} at most 63 %", tight, 63)
    for scale in SCALES:
        best = max((rows[scale, n] for n in ("serverless-vllm", "serverlessllm")), key=lambda r: r["attainment"].mean)
        gain = rows[scale, "hydraserve"].divide_by(best, "attainment")
        if scale > 1:
            result.claim_within("8.3, Fig. 10b", f"loose objectives (x {scale:g}): over the better baseline", gain, 1.38, 1.52)
            more = rows[scale, "hydraserve-cache"].divide_by(best, "attainment")
            result.claim_within("8.3, Fig. 10b", f"the same with a cache (x {scale:g})", more, 1.49, 1.58)
        else:
            result.claim_above("8.3, Fig. 10a", f"HydraServe above both baselines (x {scale:g}, ratio)", gain)
    return result
