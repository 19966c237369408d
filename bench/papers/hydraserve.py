"""HydraServe's test beds, systems and requests (section 8)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from statistics import fmean

from bench.papers.constants import hydraserve as c
from bench.papers.core import Case, Figures, label, vary_profile
from bench.papers.traffic import azure_like
from services.scheduler.domain.policies.autoscaling import scale
from services.scheduler.domain.policies.common import evict_none, keep_setting
from services.scheduler.domain.policies.port import Ask, Option, Profile
from simulator.config import (
    Batching,
    ClusterFile,
    LinkSpeeds,
    ModelGroup,
    NodeGroup,
    Runtime,
    Startup,
    names_of,
)
from simulator.policies import baselines, hydraserve, serverlessllm
from simulator.report import Outcome
from simulator.workloads.request import Request

VLLM = vary_profile(baselines.FIFO, "serverless-vllm", clear=evict_none, keep=keep_setting, scale=scale)
"""Serverless vLLM. Section 8.1: it "iterates through all GPU servers and selects the one with
sufficient GPU resources"; the autoscaler is HydraServe's.
"""
SLLM = vary_profile(serverlessllm.PROFILE, "serverlessllm", keep=keep_setting, scale=scale)
HYDRA = vary_profile(hydraserve.PROFILE, "hydraserve", clear=evict_none)
KV_MB_13B = 0.82
"""KV cache of a token of Llama2-13B: 40 layers of 2 x 5120 values of 2 bytes."""
SYSTEMS = (VLLM, SLLM, HYDRA, replace(HYDRA, name="hydraserve-cache"))
"""The last one is HydraServe that caches weights in host memory (`second_test_bed`)."""


def choose_stages(count: int) -> Callable[[Ask, Sequence[Option], str], Option | None]:
    """Return a policy that chooses, among pipelines of `count` stages, the first to answer.

    Models of up to 10 GiB start as one stage (artifact, algs.py: pipeline_parallel_static).
    """

    def choose(ask: Ask, options: Sequence[Option], seed: str) -> Option | None:
        whole = ask.need_bytes <= 10 * c.GB_PER_GIB * 1e9 + c.KV_GB.value * 1e9
        found = [o for o in options if o.stages == (1 if whole else count)]
        return min(found, key=lambda o: (o.cost.total_s, -o.full_workers, o.key), default=None)

    return choose


def startup(system: str, kinds: Sequence[str], slower: float = 1.0) -> Startup:
    """Return the times of a start beside its bytes: `floors` of the constants, by system.

    Args:
        kinds: Kinds of device; the mean over them, since the simulator has one time for all.
        slower: Factor of all times.
    """
    vllm, sllm, ours = (fmean(c.floors(k)[n] for k in kinds) * slower for n in range(3))
    if system.startswith("hydraserve"):
        container, context, libraries = (ours * part for part in c.SPLIT)
        return Startup(container_s=container, context_s=context, libraries_s=libraries)
    if system.startswith("serverlessllm"):
        return Startup(container_s=sllm, prefetch=False)
    return Startup(container_s=vllm, prefetch=False, stream=False, overlap=False)


def nodes(kind: str, count: int, devices: int, network: float, host: float) -> NodeGroup:
    links = LinkSpeeds(remote=network, ssd=1000.0, device=c.LOAD.value)
    return NodeGroup(name=kind, count=count, kind=kind, devices=devices, device_gb=c.DEVICE_GB[kind], dram_gb=host, links=links)


def runtime(system: str, start: Startup, cached: bool, gather: float = c.GATHER.value) -> Runtime:
    return Runtime(
        startup=start,
        cache_dram=cached,
        cache_ssd=False,
        hop_s=c.HOP_S.value,
        share_compute="memory",
        stage_batches=True,
        gather_gb_per_second=gather,
        window_s=c.WINDOW_S.value,
        timeout_s=1800.0,
    )


def first_test_bed(kind: str, system: str, slower: float = 1.0, cached: bool = False) -> ClusterFile:
    """Return test bed (i), with the four servers of one kind alone.

    Args:
        slower: As for `startup`.
    """
    group = nodes(kind, 4, 1 if kind == "a10" else 4, c.NETWORK.value, c.HOST_GB[kind])
    return ClusterFile(nodes=(group,), runtime=runtime(system, startup(system, [kind], slower), cached))


def second_test_bed(system: str, slower: float = 1.0, gather: float = c.GATHER.value) -> ClusterFile:
    """Return test bed (ii), with 8 A10 and 16 V100, and the mean of their start-up times.

    Args:
        slower: As for `startup`.
        gather: GB/s at which the KV cache of a group is gathered.
    """
    a10 = nodes("a10", 2, 4, c.NETWORK_A10_II.value, c.HOST_GB["a10-ii"])
    v100 = nodes("v100", 4, 4, c.NETWORK.value, c.HOST_GB["v100"])
    start = startup(system, ["a10", "v100", "v100"], slower)
    return ClusterFile(nodes=(a10, v100), runtime=runtime(system, start, system in ("serverlessllm", "hydraserve-cache"), gather))


def group(
    name: str, model: str, application: str, copies: int, scaled: float = 1.0, kv_per_token_mb: float = 0.5, table3: bool = False
) -> ModelGroup:
    """Return `copies` models of an application.

    Args:
        scaled: Factor of the objectives.
        table3: Summarization has Table 3's objective for the first token, not the artifact's.
    """
    size = "13B" if "13B" in model else "7B"
    slo_ttft = c.TABLE3_SUMMARIZATION[size] if table3 and application == "summarization" else c.SLO_TTFT[application][size]
    return ModelGroup(
        name=name,
        copies=copies,
        weights_gb=c.weights_gb(model),
        kv_gb=c.KV_GB.value,
        kv_mb_per_token=kv_per_token_mb,
        service=Batching(prefill_tokens_per_second=c.PREFILL[size], tpot_ms=c.TPOT_MS[size], concurrency=int(c.BATCH.value)),
        kinds=frozenset({"v100"}) if size == "13B" else frozenset(),
        slo_ttft=slo_ttft * scaled,
        slo_tpot=c.SLO_TPOT[application][size] * scaled,
        keep_alive=c.KEEP_ALIVE_S.value,
        replicas_max=16,
    )


def applications(scaled: float = 1.0, copies: int = c.INSTANCES, table3: bool = False) -> tuple[ModelGroup, ...]:
    """Return Table 3's models: three applications, two models, `copies` instances of each."""
    pairs = product(c.SLO_TTFT, ("Llama2-7B", "Llama2-13B"))
    return tuple(group(f"{a}-{m}", m, a, copies, scaled, table3=table3) for a, m in pairs)


def end_to_end(
    profile: Profile,
    cv: float,
    rate: float,
    seconds: float,
    scaled: float = 1.0,
    zipf: float = c.ZIPF.value,
    table3: float = False,
    **more: float,
) -> Case:
    """Return a case of section 8.3: all applications on test bed (ii).

    Args:
        cv: Coefficient of variation of a model's arrivals.
        rate: Requests per second, of all models together.
        scaled: Factor of the objectives.
        zipf: The n-th model has a share of 1/n^zipf of the requests.
        table3: 1 for Table 3's objective of summarization (`group`).
        more: Arguments of `second_test_bed`.
    """
    models = applications(scaled, table3=bool(table3))
    names = tuple(names_of(list(models)))
    lengths = tuple(c.LENGTHS[n.split("-", 1)[0]] for n in names)

    def traffic(seed: int) -> Sequence[Request]:
        return azure_like(names, lengths, rate, seconds, cv, zipf, seed)

    shown = label(cv=float(cv), rps=rate, slo=scaled, policy=profile.name)
    return Case(shown, second_test_bed(profile.name, **more), models, traffic, profile)


def measure(outcome: Outcome) -> Figures:
    """Return attainment in percent, in all and by application, and further figures.

    A request without an answer does not attain its objectives. Cost is device memory over time.
    """
    total: dict[str, int] = {}
    met: dict[str, int] = {}
    for s in outcome.served:
        application = s.model.split("-", 1)[0]
        total[application] = total.get(application, 0) + 1
        met[application] = met.get(application, 0) + s.in_time
    for model, _, _ in outcome.given_up:
        total[model.split("-", 1)[0]] = total.get(model.split("-", 1)[0], 0) + 1
    every = max(1, sum(total.values()))
    tpot = [s.tpot for s in outcome.served if s.tpot > 0]
    return {
        "attainment": 100 * sum(met.values()) / every,
        **{a: 100 * met.get(a, 0) / n for a, n in sorted(total.items())},
        "mean_ttft_s": fmean(s.ttft for s in outcome.served) if outcome.served else 0.0,
        "mean_tpot_ms": 1e3 * fmean(tpot) if tpot else 0.0,
        "cost_gb_s": outcome.device_memory_gb_seconds,
        "starts": float(sum(outcome.loads.values())),
    }
