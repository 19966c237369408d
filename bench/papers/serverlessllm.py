"""Machines, models and requests of ServerlessLLM's cluster evaluation.

The paper describes them in sections 7.3 and 7.4.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from bench.papers.constants import serverlessllm as c
from bench.papers.core import Case, Figures, label
from bench.papers.traffic import DENSER, azure_like
from services.scheduler.domain.policies.port import Profile
from shared.percentiles import percentile
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
from simulator.policies import baselines, serverlessllm, shepherd
from simulator.report import Outcome
from simulator.workloads.request import Request

SYSTEMS = ("ServerlessLLM", "Ray Serve", "Ray Serve with cache")
WARM_UP = 2
"""Requests arrive for twice the measured time; the first half fills the host memories (ours)."""
SCHEDULERS = (serverlessllm.PROFILE, shepherd.PROFILE, baselines.RANDOM)


def cluster(
    devices: int = int(c.DEVICES.value),
    together: int = 1,
    ssd: float = c.SSD.value,
    pcie: float = c.PCIE.value,
    pool: float = c.POOL_GB.value,
    network: float = c.NETWORK.value,
    cached: bool = True,
    ssd_gb: float = c.SSD_GB.value,
) -> ClusterFile:
    """Return a cluster.

    Args:
        together: Devices that serve one model as a unit, "parallel PCIe links when loading large
            models partitioned on multiple GPUs" (section 7.4).
        cached: False: nothing stays in host memory, as in Ray Serve.
    """
    links = LinkSpeeds(remote=network, ssd=ssd, device=pcie * together, sequential=frozenset({"remote", "ssd"}))
    node = NodeGroup(
        count=int(c.NODES.value),
        devices=devices // together,
        device_gb=c.DEVICE_GB.value * together,
        dram_gb=pool if cached else 0.0,
        ssd_gb=ssd_gb,
        links=links,
    )
    runtime = Runtime(startup=Startup(leave_s=c.CLEAN_UP_S.value), timeout_s=c.TIMEOUT_S.value, cache_dram=cached)
    return ClusterFile(nodes=(node,), runtime=runtime)


def group(model: str, dataset: str, slower: float = 1.0, copies: int | None = None) -> ModelGroup:
    """Maximum concurrency 1, and a GPU to itself (footnote 3 counts so).

    A token takes the data set's inference time over its answers' mean length; larger models take
    longer by their bytes, since decoding is bound by reading weights (ours: the paper states
    OPT-6.7B's only).
    """
    lengths = c.DATASETS[dataset]
    seconds = c.SHAREGPT_S / (c.RATIO if dataset == "GSM8K" else 1.0) * c.WEIGHTS_GB[model] / c.WEIGHTS_GB["OPT-6.7B"] * slower
    token = seconds / (lengths.output + c.RECOMPUTE * lengths.prompt)
    return ModelGroup(
        name=model,
        copies=c.COPIES[model] if copies is None else copies,
        weights_gb=c.WEIGHTS_GB[model],
        kv_gb=c.DEVICE_GB.value * (2 if model == "OPT-30B" else 1) - c.WEIGHTS_GB[model],
        service=Batching(prefill_tokens_per_second=1 / (c.RECOMPUTE * token), tpot_ms=token * 1e3, concurrency=1),
        slo_ttft=c.TIMEOUT_S.value,
        replicas_max=16,
    )


def traffic(
    model: ModelGroup,
    dataset: str,
    rps: float,
    seconds: float,
    cv: float = c.CV.value,
    zipf: float = c.ZIPF.value,
    denser: float = DENSER,
) -> Callable[[int], Sequence[Request]]:
    names = tuple(names_of([model]))
    lengths = (c.DATASETS[dataset],) * len(names)
    return lambda seed: azure_like(names, lengths, rps, WARM_UP * seconds, cv, zipf, seed, denser)


def ray_serve(
    cached: bool, network: float = c.NETWORK.value, devices: int = int(c.DEVICES.value), together: int = 1
) -> ClusterFile:
    """Return Ray Serve, which loads safetensors after the download.

    It loads at the RAID's speed over the factor of section 7.2. Its downloads share the server's
    network (section 7.4 estimates each as if it had it alone).

    Args:
        cached: With a disk cache that begins with one copy of each model in the cluster.
    """
    machines = cluster(devices, together, network=network, cached=False, ssd_gb=c.SSD_GB.value if cached else 0.0, ssd=1000.0)
    node = machines.nodes[0]
    links = node.links.model_copy(update={"device": c.RAID.value / c.SAFETENSORS.value, "sequential": frozenset()})
    startup = machines.runtime.startup.model_copy(update={"stream": False})
    runtime = machines.runtime.model_copy(update={"startup": startup, "cache_ssd": cached})
    return ClusterFile(nodes=(node.model_copy(update={"links": links}),), runtime=runtime)


def build_case(
    system: str, model: str, dataset: str, rps: float, seconds: float, devices: int = int(c.DEVICES.value), **more: float
) -> Case:
    """One point of Fig. 10 to 12: ServerlessLLM, Ray Serve, or Ray Serve with a cache."""
    together = 2 if model == "OPT-30B" else 1
    models = group(model, dataset, copies=int(more["copies"]) if "copies" in more else None)
    network = more.get("network", c.NETWORK.value)
    ours = system == "ServerlessLLM"
    machines = cluster(devices, together, network=network) if ours else ray_serve("cache" in system, network, devices, together)
    profile = serverlessllm.PROFILE if ours else baselines.KEEP_ALIVE
    shown = label(model=model, dataset=dataset, rps=rps, devices=float(devices), models=float(models.copies), system=system)
    return Case(shown, machines, (models,), traffic(models, dataset, rps, seconds), profile, everywhere=ours)


def case(model: str, dataset: str, rps: float, profile: Profile, seconds: float, zipf: float = c.ZIPF.value, **more: float) -> Case:
    """One point of Fig. 8 and 9.

    A single copy of OPT-30B takes two devices: 66 GB do not fit on one.
    """
    slower, denser = more.pop("slower", 1.0), more.pop("denser", DENSER)
    models = group(model, dataset, slower)
    machines = cluster(together=2 if model == "OPT-30B" else 1, **more)  # type: ignore[arg-type]  # floats of the sensitivity runs only
    shown = label(model=model, dataset=dataset, rps=rps, policy=profile.name)
    return Case(
        shown, machines, (models,), traffic(models, dataset, rps, seconds, zipf=zipf, denser=denser), profile, everywhere=True
    )


def measure(outcome: Outcome) -> Figures:
    """Measure the second half of the requests: start-up latency including the pause.

    The definition is section 7.1's; a request that timed out has waited for 300 s. Loads,
    migrations and preemptions are of the whole run, for 1,000 requests.
    """
    every = sorted([s.at for s in outcome.served] + [at for _, at, _ in outcome.given_up])
    middle = every[len(every) // WARM_UP] if every else 0.0
    lost = sum(at >= middle for _, at, _ in outcome.given_up)
    waits = sorted([s.startup for s in outcome.served if s.at >= middle] + [c.TIMEOUT_S.value] * lost)
    loads = sum(outcome.loads.get(t, 0) for t in ("dram", "ssd", "remote"))
    total = max(1, len(waits))
    each = 1000 / max(1, len(every))
    return {
        "mean_s": sum(waits) / total,
        "p95_s": percentile(waits, 95, default=0.0),
        "p99_s": percentile(waits, 99, default=0.0),
        "ssd_share": outcome.loads.get("ssd", 0) / loads if loads else 0.0,
        "ssd_loads": outcome.loads.get("ssd", 0) * each,
        "migrations": outcome.migrations * each,
        "preemptions": outcome.preemptions * each,
        "served_share": 1 - lost / total,
    }
