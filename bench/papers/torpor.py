"""Torpor's nodes, functions and requests (section 7), and variants of its policy.

Section 7.3 compares the variants.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

from bench.papers.constants import torpor as c
from bench.papers.core import Case, Figures, label, vary_profile
from bench.papers.traffic import bursts
from services.scheduler.domain.policies.common import arrivals, evict_lru
from services.scheduler.domain.policies.port import Ask, Option, Profile, draw_number
from shared.percentiles import percentile
from simulator.config import ClusterFile, Fixed, LinkSpeeds, ModelGroup, NodeGroup, Runtime, Startup
from simulator.policies import baselines, torpor
from simulator.report import Outcome
from simulator.workloads.request import Request

WARM_UP_S = 60.0
"""Every function is asked for once in the first minute, "warmed up before running the test
workloads"; these requests are not counted.
"""


def random_swap(ask: Ask, options: Sequence[Option], seed: str) -> Option | None:
    """Schedule as Torpor-Random.

    It "randomly schedules a request to an idle GPU if the target model is not loaded, and then
    triggers model swapping".
    """
    free = [o for o in options if not any(d.running for d in o.devices)]
    if here := [o for o in free if o.way == "ready"]:
        return sorted(here, key=lambda o: o.key)[int(draw_number(seed, ask.model, "here") * len(here))]
    swaps = sorted((o for o in free if o.way == "load"), key=lambda o: o.key)
    return swaps[int(draw_number(seed, ask.model) * len(swaps))] if swaps else None


NO_LINKS = torpor.PROFILE.uses - {"peer_copy"}
VARIANTS = (
    torpor.PROFILE,
    vary_profile(torpor.PROFILE, "torpor-fifo", order=arrivals, slo_queue=False),
    vary_profile(torpor.PROFILE, "torpor-random", choose=random_swap, uses=NO_LINKS),
    vary_profile(torpor.PROFILE, "torpor-lru", clear=evict_lru),
)
SIMPLE = vary_profile(
    torpor.PROFILE, "simple-swap", order=arrivals, slo_queue=False, choose=random_swap, clear=evict_lru, uses=NO_LINKS
)
NONSWAP = vary_profile(baselines.NATIVE, "nonswap")


def cluster(
    nodes: int, swapping: bool, pcie: float = c.PCIE.value, nvlink: float = c.NVLINK.value, cold_s: float = 0.0
) -> ClusterFile:
    """Return a cluster.

    Args:
        swapping: Devices execute one request at a time and begin behind the first bytes. Else
            instances share a device, and begin cold.
    """
    n = int(c.DEVICES.value)
    # Fig. 5 shows pairs behind one PCIe switch and links "with various bandwidths": two links
    # within a pair, one across, is ours.
    peer = tuple(tuple(0.0 if a == b else nvlink * (2 if a // 2 == b // 2 else 1) for b in range(n)) for a in range(n))
    links = LinkSpeeds(remote=1000, ssd=1000, device=pcie, bus=c.BUS.value * pcie / c.PCIE.value, bus_devices=2, peer=peer)
    group = NodeGroup(count=nodes, devices=n, device_gb=c.DEVICE_GB.value, dram_gb=c.HOST_GB.value, links=links)
    runtime = Runtime(
        exclusive=swapping, homes=nodes > 1, in_dram=True, startup=Startup(container_s=cold_s, prefetch=False), timeout_s=1e9
    )
    return ClusterFile(nodes=(group,), runtime=runtime)


def functions(
    count: int,
    deadline: float,
    deadline_bert: float,
    native: bool = False,
    keep: Sequence[float] = (),
    kinds: Sequence[c.Model] = c.MODELS,
) -> tuple[ModelGroup, ...]:
    """Models "distributed across inference functions in a round-robin manner".

    Args:
        native: Give each a runtime of its own and the native latency.
    """
    made = []
    for n in range(count):
        m = kinds[n % len(kinds)]
        footprint = c.FOOTPRINT_BERT_GB.value if m.bert else c.FOOTPRINT_GB.value
        made.append(
            ModelGroup(
                name=f"f{n}-{m.name}",
                weights_gb=m.gb,
                kv_gb=footprint - m.gb if native else 0.0,
                service=Fixed(seconds=(m.native if native else m.remoting) / 1e3),
                slo_ttft=deadline_bert if m.bert else deadline,
                percentile=c.PERCENTILE.value,
                keep_alive=keep[n] if keep else -1,
                heavy=m.heavy,
            )
        )
    return tuple(made)


def rates(count: int, seed: int) -> list[float]:
    """Requests a second of each function."""
    random = Random(f"rates {seed}")
    return [random.uniform(c.RATE_LOW.value, c.RATE_HIGH.value) / 60 for _ in range(count)]


def traffic(models: Sequence[ModelGroup], seconds: float, cv: float = 1.0) -> Callable[[int], Sequence[Request]]:
    """Return gamma arrivals of each function (CV 1: Poisson).

    One request of each function precedes them in the warm-up.
    """

    def make(seed: int) -> list[Request]:
        random = Random(f"torpor {seed} {cv}")
        found = [(WARM_UP_S * n / len(models) * 0.5, m.name) for n, m in enumerate(models)]
        for m, rate in zip(models, rates(len(models), seed), strict=True):
            found += [(WARM_UP_S + at, m.name) for at in bursts(rate, seconds, cv, random)]
        return [Request(at, name, 1, 1) for at, name in sorted(found)]

    return make


def case(
    count: int,
    profile: Profile,
    seconds: float,
    deadline: float = 0.08,
    bert: float = 0.2,
    nodes: int = 1,
    kinds: Sequence[c.Model] = c.MODELS,
    **more: float,
) -> Case:
    """Return the case of `profile`, on machines that swap models in.

    The machines of the profiles native and infless-ka do not swap.
    """
    native = profile.name in ("native", "infless-ka")
    cv = more.pop("cv", 1.0)
    keep = [more.pop("keep_s")] * count if "keep_s" in more else ()
    models = functions(count, deadline, bert, native, keep, kinds)
    machines = cluster(nodes, not native, cold_s=c.COLD_S.value if native else 0.0, **more)
    shown = label(functions=str(count), deadline_ms=str(round(deadline * 1e3)), policy=profile.name)
    return Case(shown, machines, models, traffic(models, seconds, cv), profile)


def measure(outcome: Outcome) -> Figures:
    """Measure the requests after the warm-up.

    The figures are functions executed, functions that comply, and latency over the deadline's
    percentile.
    """
    total: dict[str, int] = {}
    met: dict[str, int] = {}
    latencies: dict[str, list[float]] = {"cv": [], "bert": []}
    for s in outcome.served:
        if s.at >= WARM_UP_S:
            total[s.model] = total.get(s.model, 0) + 1
            met[s.model] = met.get(s.model, 0) + s.in_time
            latencies["bert" if "bert" in s.model else "cv"].append(s.ttft)
    for model, at, _ in outcome.given_up:
        if at >= WARM_UP_S:
            total[model] = total.get(model, 0) + 1
    compliant = sum(met.get(m, 0) >= c.PERCENTILE.value * n for m, n in total.items())
    swaps = sum(outcome.loads.values()) - outcome.loads.get("ready", 0)
    return {
        "compliant_share": compliant / max(1, len(total)),
        "compliant": float(compliant),
        "executed": float(len({s.model for s in outcome.served})),
        "p98_cv_ms": 1e3 * percentile(latencies["cv"], 98, default=0.0),
        "p98_bert_ms": 1e3 * percentile(latencies["bert"], 98, default=0.0),
        "load_variance": outcome.load_variance() or 0.0,
        "swap_share": swaps / max(1, len(outcome.served)),
    }
