"""HydraServe Fig. 9: TTFT attainment over the request rate and its variation.

With Fig. 11, the figures are by application.
"""

from __future__ import annotations

from bench.papers import hydraserve as h
from bench.papers.constants import hydraserve as c
from bench.papers.core import Options, Result, estimate

NAME = "hydraserve-fig9"


def run(options: Options) -> Result:
    result = Result(NAME, "TTFT attainment (percent), test bed (ii)")
    seconds = options.seconds(c.DURATION_S.value)
    result.measure_cases((h.end_to_end(p, cv, r, seconds) for cv in c.CVS for r in c.RATES for p in h.SYSTEMS), options, h.measure)
    cached, gains = [], []
    for n, cv in enumerate(c.CVS):
        for m, rate in enumerate(c.RATES):
            rows = {p.name: result.row(cv=f"{cv:g}", rps=f"{rate:g}", policy=p.name) for p in h.SYSTEMS}
            for name, row in rows.items():
                row.paper["attainment"] = c.FIG9[name][n][m]
                stated = c.FIG9[name][n][m]
                result.share("artifact, Fig. 9", f"CV {cv}, {rate:g} RPS: {name}, percent", row["attainment"], stated, 100)
            best = max((rows["serverless-vllm"], rows["serverlessllm"]), key=lambda r: r["attainment"].mean)
            gains.append(rows["hydraserve"].divide_by(best, "attainment"))
            cached.append(rows["hydraserve-cache"].divide_by(rows["hydraserve"], "attainment").mean)
    least = min(gains, key=lambda g: g.mean)
    result.claim_above("8.3, Fig. 9", "HydraServe above both baselines in every setting (least ratio)", least)
    result.ratio("8.3, Fig. 9", "HydraServe over the better baseline, the least", least, 1.43)
    result.ratio("8.3, Fig. 9", "HydraServe over the better baseline, the most", max(gains, key=lambda g: g.mean), 1.74)
    result.ratio("8.3, Fig. 9", "with a cache, over HydraServe: up to 1.11", estimate([max(cached)]), 1.11)
    result.notes += [
        "Workload generated: shares 1/n over 384 models, Gamma arrivals, drawn down to the rate as the artifact does; one hour.",
        "Llama2-13B on V100 only (it does not fit on an A10), Llama2-7B on either.",
    ]
    if options.sensitivity:
        sensitivity(result, options, seconds)
    return result


def sensitivity(result: Result, options: Options, seconds: float) -> None:
    few = options.few
    for what, factor in ((w, f) for w in ("zipf", "slower") for f in (0.5, 1.5)):
        value = factor * (c.ZIPF.value if what == "zipf" else 1.0)
        part = Result("", "")
        part.measure_cases((h.end_to_end(p, 8, 0.6, seconds, **{what: value}) for p in h.SYSTEMS), few, h.measure)
        shares = ", ".join(f"{r.label['policy']} {r['attainment']}" for r in part.rows)
        name = "popularity 1/n^z, z" if what == "zipf" else "times beside the bytes,"
        result.notes.append(f"Sensitivity, {name} x {factor}, CV 8, 0.6 RPS: {shares}.")
