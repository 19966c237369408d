"""Clusters and workloads drawn at random, for bench.regret. Equal seeds draw equal cases."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import exp, log
from random import Random

from simulator.config import Batching, ClusterFile, Fixed, LinkSpeeds, ModelGroup, NodeGroup, Runtime, Service, Startup, names_of
from simulator.workloads.request import Request
from simulator.workloads.synthetic import DATASETS, Burst, Synthetic, synthetic

REQUESTS = 600
"""Requests of a case of length 1, on average."""
_BETWEEN_SEEDS = 1_000_003
_MOST_COPIES = 40
_DEVICE_GB = (16, 24, 40, 48, 80)


@dataclass(frozen=True, slots=True)
class RandomCase:
    """One cluster with its models and requests.

    Attributes:
        about: What was drawn, for a reader who looks for the cause of a figure.
    """

    seed: int
    cluster: ClusterFile
    models: tuple[ModelGroup, ...]
    requests: tuple[Request, ...]
    about: dict[str, float | str]


def draw(seed: int, length: int = 1, repeat: int = 0) -> RandomCase:
    """Draw a case.

    Sizes, links, popularity, burstiness, objectives and load are independent of each other. The
    load is the share of the devices' time that executing the requests takes if none waits.

    Args:
        seed: Seed of the cluster, the models and the workload.
        length: The workload lasts so many times as long, with as many times the requests and
            bursts.
        repeat: Number of the draw of the requests, and of which models are popular. All draws have
            the same cluster, models and workload.
    """
    random = Random(f"regret:{seed}")
    node = _node(random)
    runtime = Runtime(
        startup=Startup(
            container_s=random.choice((0.0, 0.1, 1.0, 5.0)),
            context_s=random.choice((0.0, 0.3)),
            libraries_s=random.choice((0.0, 1.5, 4.0)),
            init_s=random.choice((0.05, 0.3, 2.0)),
            leave_s=random.choice((0.01, 0.05, 0.3)),
            restore_s=random.choice((0.05, 0.3)),
        ),
        hop_s=0.002,
        in_dram=random.random() < 0.5,
    )
    models = _models(random, node)
    lengths = DATASETS[random.choice(sorted(DATASETS))]
    load = random.uniform(0.1, 0.8)
    busy_s = sum(m.copies * _execution_s(m, lengths.prompt, lengths.output) for m in models) / sum(m.copies for m in models)
    rate = load * node.count * node.devices / busy_s
    seconds = REQUESTS / rate
    bursts = [Burst(random.uniform(0, seconds), seconds / 20, random.uniform(2, 6)) for _ in range(random.choice((0, 0, 1, 3)))]
    traffic = Synthetic(
        requests_per_second=rate,
        seconds=length * seconds,
        cv=random.choice((0.5, 1.0, 2.0, 4.0, 8.0)),
        zipf=random.uniform(0.0, 1.5),
        popularity=random.choice(("zipf", "zipf", "azure")),
        prompt_tokens=lengths.prompt,
        output_tokens=lengths.output,
        length_cv=lengths.cv,
        each=random.random() < 0.7,
        models_shuffled=True,
        bursts=tuple(replace(b, at=b.at + n * seconds) for n in range(length) for b in bursts),
    )
    names = names_of(models)
    about: dict[str, float | str] = {
        "devices": node.count * node.devices,
        "device_gb": node.device_gb,
        "models": len(names),
        "models_gb": round(sum(m.copies * (m.weights_gb + m.kv_gb) for m in models)),
        "load": round(load, 2),
        "cv": traffic.cv,
        "seconds": round(traffic.seconds),
    }
    cluster = ClusterFile(nodes=(node,), runtime=runtime)
    return RandomCase(seed, cluster, models, tuple(synthetic(traffic, names, seed + repeat * _BETWEEN_SEEDS)), about)


def _node(random: Random) -> NodeGroup:
    devices = random.choice((1, 2, 4, 8))
    device_gb = float(random.choice(_DEVICE_GB))
    links = LinkSpeeds(
        remote=random.choice((0.3, 1.25, 3.0)),
        ssd=random.choice((1.0, 3.0, 6.0)),
        device=random.choice((12.0, 24.0, 50.0)),
        bus=random.choice((None, 15.0, 36.0)),
        peer=random.choice((None, 40.0, 200.0)),
    )
    return NodeGroup(
        count=random.choice((1, 1, 2, 4)),
        devices=devices,
        device_gb=device_gb,
        dram_gb=devices * device_gb * random.choice((0.5, 1.0, 2.0, 4.0)),
        ssd_gb=random.choice((0.0, 2000.0)),
        links=links,
    )


def _models(random: Random, node: NodeGroup) -> tuple[ModelGroup, ...]:
    """Draw models of one to four kinds that together need 0.7 to 6 times the devices' memory."""
    kinds = random.randint(1, 4)
    room_gb = node.count * node.devices * node.device_gb * random.uniform(0.7, 6.0) / kinds
    return tuple(_model(random, f"m{n}", node, room_gb) for n in range(kinds))


def _model(random: Random, name: str, node: NodeGroup, room_gb: float) -> ModelGroup:
    weights_gb = min(node.device_gb * 0.7, exp(random.uniform(log(0.5), log(60.0))))
    is_batching = random.random() < 0.75
    service: Service = Fixed(seconds=random.choice((0.05, 0.3, 2.0)))
    if is_batching:
        concurrency = random.choice((1, 8, 16))
        tpot_ms = 4 + 1.2 * weights_gb
        service = Batching(
            prefill_tokens_per_second=60_000 / (3 + weights_gb),
            tpot_ms=tpot_ms,
            tpot_ms_more=0.03 * tpot_ms,
            concurrency=concurrency,
        )
    alone_s = weights_gb / node.links.device
    kv_gb = min(node.device_gb * 0.25, weights_gb * random.choice((0.1, 0.3, 0.6)))
    return ModelGroup(
        name=name,
        copies=min(_MOST_COPIES, max(2, round(room_gb / (weights_gb + kv_gb)))),
        weights_gb=weights_gb,
        kv_gb=kv_gb,
        kv_mb_per_token=0.03 * weights_gb,
        service=service,
        slo_ttft=random.choice((2.0, 5.0, 20.0)) * (0.2 + alone_s),
        keep_alive=random.choice((10.0, 60.0, 300.0)),
        replicas_max=random.choice((1, 2, 4)),
        heavy=alone_s > 0.05,
    )


def _execution_s(model: ModelGroup, prompt: float, output: float) -> float:
    """Return the device seconds of a request in a full batch."""
    service = model.service
    if isinstance(service, Fixed):
        return service.seconds
    decoding_s = output * (service.tpot_ms + service.tpot_ms_more * (service.concurrency - 1)) / 1e3 / service.concurrency
    return prompt / service.prefill_tokens_per_second + decoding_s
