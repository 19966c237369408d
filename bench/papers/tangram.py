"""Tangram's machines, models and requests (section 5), and SLLM-CM, its baseline."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from random import Random
from statistics import fmean

from bench.papers.constants import tangram as c
from bench.papers.core import Case, Figures, label, vary_profile
from services.scheduler.domain.policies.common import evict_lru
from services.scheduler.domain.policies.port import Profile
from shared.percentiles import percentile
from simulator.config import Batching, ClusterFile, LinkSpeeds, ModelGroup, NodeGroup, Runtime, Startup
from simulator.policies import baselines, tangram
from simulator.report import Outcome
from simulator.workloads.request import Request


def release(keep_alive: float, load_s: float) -> float:
    """Return a keep-alive of 0 s: an instance ends with its request.

    Section 3.1: parameters are retained "after the model instance is released".
    """
    return 0.0


TANGRAM = vary_profile(tangram.PROFILE, "tangram", keep=release)
SLLM_CM = vary_profile(tangram.PROFILE, "sllm-cm", keep=release, uses=frozenset(), clear=evict_lru)
RANDOM = vary_profile(SLLM_CM, "sllm-cm", choose=baselines.any_device)
"""Section 5.6: "SLLM-CM's random GPU selection"."""


def cluster(
    ours: bool, devices: int = 1, gb: float = c.DEVICE_GB.value, pcie: float = c.PCIE.value, merge: float = c.MERGE.value
) -> ClusterFile:
    """Return a cluster with one device for each worker.

    "All missing tensors are served from CPU memory" (section 5.1).
    """
    links = LinkSpeeds(remote=1000.0, ssd=1000.0, device=pcie)
    nodes = NodeGroup(count=devices, devices=1, device_gb=gb, dram_gb=1000.0, links=links)
    query = c.QUERY_S.value if ours and devices > 1 else 0.0
    runtime = Runtime(
        startup=Startup(container_s=c.OTHER_S.value + query, prefetch=False),
        in_dram=True,
        share_compute="memory",
        elastic_kv=ours,
        kv_overhead=c.KV_OVERHEAD.value if ours else 0.0,
        merge_gb_per_second=merge if ours else None,
        merge_share=c.MERGED.value,
        timeout_s=1e6,
    )
    return ClusterFile(nodes=(nodes,), runtime=runtime)


def groups(ours: bool, models: Sequence[c.Model], names: Sequence[str], batch: float, gb: float) -> tuple[ModelGroup, ...]:
    """Return the models; SLLM-CM reserves the rest of the device for the KV cache.

    "All remaining GPU memory is reserved" (section 3.3).
    """
    return tuple(
        ModelGroup(
            name=name,
            weights_gb=m.gb,
            kv_gb=0.0 if ours else max(0.0, gb - m.gb - 0.01),
            kv_mb_per_token=m.kv_mb * batch if ours else 0.0,
            service=Batching(prefill_tokens_per_second=1e6, tpot_ms=1e3 * c.BATCH.value / m.throughput, concurrency=1),
            slo_ttft=60.0,
            replicas_max=8,
        )
        for name, m in zip(names, models, strict=True)
    )


def sequence(names: Sequence[str], level: str, count: int, gap: float, seed: int, apart: float = 0.0) -> list[Request]:
    """Return requests with gamma gaps of at least `apart` seconds.

    The next request is for the same model with the level's probability, else for any other model
    with equal probabilities.
    """
    random = Random(f"{level} {seed}")
    shape = 1 / c.CV[level] ** 2
    at, last, found = 0.0, "", []
    for _ in range(count):
        at += apart + random.gammavariate(shape, gap / shape)
        if not last or random.random() >= c.REPEATED[level]:
            last = random.choice([n for n in names if n != last])
        found.append(Request(at, last, *random.choice(c.DATASETS).draw(random)))
    return found


def name_copies(models: Sequence[c.Model]) -> list[str]:
    """Several copies of a model are different models."""
    return [f"{m.name}-{n}" for n, m in enumerate(models)]


def build_single_device(
    profile: Profile,
    level: str,
    batch: float,
    count: int,
    models: Sequence[c.Model] = c.MODELS,
    shown: str = "",
    more: Mapping[str, float] | None = None,
) -> Case:
    """Fig. 8 and 12: one device.

    Args:
        more: Other constants of `cluster`.
    """
    ours, names = profile is TANGRAM, name_copies(models)
    gap = c.GAP_S.value
    parts = label(locality=level, batch=f"{batch:g}", pool=shown or f"{sum(m.gb for m in models):.0f} GB", policy=profile.name)
    traffic: Callable[[int], Sequence[Request]] = lambda seed: sequence(names, level, count, gap, seed, gap)  # noqa: E731  # it is a field
    return Case(parts, cluster(ours, **(more or {})), groups(ours, models, names, batch, c.DEVICE_GB.value), traffic, profile)  # type: ignore[arg-type]  # sensitivity


def measure(outcome: Outcome) -> Figures:
    """Load: time to the first token less what is beside it.

    By model, of one that is asked for.
    """
    found = {
        "load_s": fmean(max(0.0, s.ttft - c.OTHER_S.value) for s in outcome.served),
        "ttft_s": fmean(s.ttft for s in outcome.served),
        "p99_ttft_s": percentile((s.ttft for s in outcome.served), 99, default=0.0),
        "reused": (outcome.loads.get("reuse", 0) + outcome.loads.get("ready", 0)) / max(1, sum(outcome.loads.values())),
    }
    for name in sorted({s.model for s in outcome.served}):
        if name.rsplit("-", 1)[1] in "01234567" and len(name.rsplit("-", 1)[1]) == 1:
            mine = [s.ttft for s in outcome.served if s.model == name]
            found[f"ttft {name}"] = fmean(mine)
            found[f"load {name}"] = fmean(max(0.0, t - c.OTHER_S.value) for t in mine)
    return found
