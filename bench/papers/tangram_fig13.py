"""Tangram Fig. 13: the 99th percentile of the TTFT over devices and request rates."""

from __future__ import annotations

from bench.papers import tangram as t
from bench.papers.constants import tangram as c
from bench.papers.core import Case, Options, Result, label
from bench.papers.tangram_fig12 import part
from services.scheduler.domain.policies.port import Profile

NAME = "tangram-fig13"
DEVICES = (1, 2, 4, 6, 8)
RATES = (0.4, 1.6)
SECONDS = 1200.0
"""Not stated."""
MODELS = tuple(m for m in c.MODELS if m.gb < 20)
"""Models that fit a device of 24 GB with a KV cache; the paper does not name its models."""


def case(profile: Profile, rate: float, devices: int, seconds: float, level: str = "L3") -> Case:
    ours, names = profile.name == "tangram", t.name_copies(MODELS)
    gb = c.SMALL_DEVICE_GB.value
    count = max(10, round(rate * seconds))
    shown = label(rps=rate, devices=str(devices), policy=profile.name)
    models = t.groups(ours, MODELS, names, 1, gb)
    return Case(shown, t.cluster(ours, devices, gb), models, lambda seed: t.sequence(names, level, count, 1 / rate, seed), profile)


def run(options: Options) -> Result:
    result = Result(NAME, "99th percentile of the TTFT (seconds)")
    seconds = options.seconds(SECONDS)
    result.measure_cases((case(p, r, d, seconds) for r in RATES for d in DEVICES for p in (t.RANDOM, t.TANGRAM)), options, part)
    for rate in RATES:
        for devices in DEVICES:
            ours, base = (result.row(rps=f"{rate:g}", devices=str(devices), policy=p.name) for p in (t.TANGRAM, t.RANDOM))
            ratio = ours.divide_by(base, "p99_ttft_s")
            if rate == 0.4:
                result.claim_below("5.6, Fig. 13", f"0.4 RPS, {devices} devices: Tangram below SLLM-CM (ratio)", ratio)
            elif devices >= 6:
                result.claim_within("5.6, Fig. 13", f"1.6 RPS, {devices} devices: 8 to 54 % lower (ratio)", ratio, 0.46, 0.92)
            elif devices == 1:
                result.claim_alike("5.6, Fig. 13", "1.6 RPS, few devices: both converge, queueing dominates (ratio)", ratio)
    for p in (t.RANDOM, t.TANGRAM):
        flat = result.row(rps="0.4", devices="8", policy=p.name).divide_by(
            result.row(rps="0.4", devices="4", policy=p.name), "p99_ttft_s"
        )
        result.claim_alike("5.6, Fig. 13", f"0.4 RPS: {p.name} no better beyond 4 devices (8 over 4)", flat)
    return result
