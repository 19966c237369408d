"""The simulator itself: requests per minute, and `thaw` against each paper's policy on a small
version of that paper's set-up.

    python -m bench.simulator [--seeds 10] [--requests 20000] [--only speed|policies] [--json PATH]

Speed: a cluster of 16 devices, 32 models in batching engines, bursty arrivals; processor time
beside wall time, since a shared machine stretches the latter. Policies: means over seeds with 95 %
intervals. Whole experiments of the papers are in bench/papers; these are small on purpose.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.report import machine
from simulator.config import (
    Batching,
    ClusterFile,
    Fixed,
    LinkSpeeds,
    ModelGroup,
    NodeGroup,
    Runtime,
    Startup,
    names_of,
)
from simulator.plots import interval
from simulator.policies import PROFILES
from simulator.simulate import simulate
from simulator.workloads.synthetic import DATASETS, LOCALITY, Synthetic, synthetic


@dataclass(frozen=True, slots=True)
class Case:
    cluster: ClusterFile
    models: tuple[ModelGroup, ...]
    workload: Synthetic
    policies: tuple[str, ...]
    """The paper's own, and those it compares with."""


def opt(gb: float, copies: int, tpot_ms: float) -> ModelGroup:
    """Return models that serve one request at a time.

    Recomputing takes a tenth of generating (ServerlessLLM section 5.2).
    """
    service = Batching(prefill_tokens_per_second=10_000 / tpot_ms, tpot_ms=tpot_ms, concurrency=1)
    return ModelGroup(name=f"opt-{gb:g}", copies=copies, weights_gb=gb, kv_gb=4, service=service, slo_ttft=10, replicas_max=16)


def serverlessllm() -> Case:
    links = LinkSpeeds(remote=1.25, ssd=6, device=31.5, sequential=frozenset({"remote", "ssd"}))
    node = NodeGroup(count=4, devices=4, device_gb=48, dram_gb=165, ssd_gb=2000, links=links)
    lengths = DATASETS["gsm8k"]
    traffic = Synthetic(1.4, 600, 8, 1.0, lengths.prompt, lengths.output, lengths.cv, each=True, models_shuffled=True)
    cluster = ClusterFile(nodes=(node,), runtime=Runtime(startup=Startup(leave_s=0.026), ssd_copies="full"))
    return Case(cluster, (opt(13.4, 32, 25),), traffic, ("serverlessllm", "shepherd", "serverless-random"))


def torpor() -> Case:
    links = LinkSpeeds(remote=1.25, ssd=2, device=12, bus=14.9, peer=40)
    node = NodeGroup(devices=4, device_gb=32, dram_gb=384, links=links)
    latencies = {"densenet": (25, 0.08, False), "resnet": (14, 0.25, False), "bert": (43, 1.35, True)}
    models = tuple(
        ModelGroup(
            name=name,
            copies=100,
            weights_gb=gb,
            service=Fixed(seconds=ms / 1e3),
            slo_ttft=0.2 if heavy else 0.08,
            heavy=heavy,
            keep_alive=-1,
        )
        for name, (ms, gb, heavy) in latencies.items()
    )
    cluster = ClusterFile(nodes=(node,), runtime=Runtime(exclusive=True, in_dram=True))
    return Case(cluster, models, Synthetic(300 / 6, 120, 1, 0.3), ("torpor", "simple-swap"))


def tangram() -> Case:
    links = LinkSpeeds(remote=1.25, ssd=6, device=24)
    node = NodeGroup(devices=1, device_gb=45, dram_gb=1000, links=links)
    sizes = {
        "gpt": 40.0,
        "opt-13b": 26.0,
        "opt-6.7b": 13.4,
        "opt-1.3b": 2.6,
        "yi-9b": 17.6,
        "llama-8b": 16.0,
        "llama-3b": 6.4,
        "qwen-3b": 6.2,
    }
    models = tuple(
        ModelGroup(
            name=name,
            weights_gb=gb,
            kv_mb_per_token=0.4,
            service=Batching(prefill_tokens_per_second=5000, tpot_ms=20, concurrency=1),
            slo_ttft=5,
            keep_alive=0,
        )
        for name, gb in sizes.items()
    )
    lengths, level = DATASETS["sharegpt"], LOCALITY["L3"]
    traffic = Synthetic(0.08, 3000, level.cv, 0.5, lengths.prompt, lengths.output, lengths.cv, run=level.run)
    runtime = Runtime(startup=Startup(init_s=0.2), elastic_kv=True, kv_overhead=0.03, in_dram=True)
    return Case(ClusterFile(nodes=(node,), runtime=runtime), models, traffic, ("tangram", "serverless-random"))


def hydraserve() -> Case:
    def group(name: str, kind: str, count: int, devices: int, gb: float, dram: float) -> NodeGroup:
        return NodeGroup(
            name=name,
            kind=kind,
            count=count,
            devices=devices,
            device_gb=gb,
            dram_gb=dram,
            links=LinkSpeeds(remote=2, ssd=1, device=12),
        )

    startup = Startup(container_s=2, context_s=0.5, libraries_s=3)
    runtime = Runtime(
        startup=startup,
        hop_s=0.002,
        share_compute="memory",
        cache_dram=False,
        cache_ssd=False,
        gather_gb_per_second=2,
        window_s=1,
    )
    nodes = (group("a10", "a10", 4, 1, 24, 188), group("v100", "v100", 4, 4, 32, 368))

    def model(name: str, kind: str, gb: float, kv: float, ttft: float, tpot: float, slo: float) -> ModelGroup:
        service = Batching(prefill_tokens_per_second=1024 / ttft, tpot_ms=tpot, concurrency=8)
        return ModelGroup(
            name=name,
            copies=32,
            weights_gb=gb,
            kv_gb=kv,
            kv_mb_per_token=0.5,
            kinds=frozenset({kind}),
            service=service,
            slo_ttft=slo,
            slo_tpot=0.2,
            keep_alive=60,
            replicas_max=4,
        )

    models = (model("7b", "a10", 12.5, 8, 1.5, 42, 7.5), model("13b", "v100", 24.2, 6, 2.4, 58, 12))
    lengths = DATASETS["sharegpt"]
    traffic = Synthetic(0.6, 900, 8, 1.0, lengths.prompt, lengths.output, lengths.cv, each=True, models_shuffled=True)
    return Case(ClusterFile(nodes=nodes, runtime=runtime), models, traffic, ("hydraserve", "serverless-random", "serverlessllm"))


def build_mixed_case() -> Case:
    """Return a mixed workload: large and small models, batching and not, hot and cold.

    The machines have every link and memory.
    """
    links = LinkSpeeds(remote=2, ssd=5, device=24, bus=36, peer=50, sequential=frozenset({"ssd"}))
    node = NodeGroup(count=4, devices=4, device_gb=48, dram_gb=160, ssd_gb=400, links=links)
    startup = Startup(container_s=1, context_s=0.3, libraries_s=1.5, init_s=0.3, leave_s=0.05)
    chat = Batching(prefill_tokens_per_second=6000, tpot_ms=25, tpot_ms_more=0.7, concurrency=16)
    models = (
        ModelGroup(
            name="chat",
            copies=16,
            weights_gb=16,
            kv_gb=8,
            kv_mb_per_token=0.13,
            service=chat,
            slo_ttft=4,
            slo_tpot=0.1,
            replicas_max=4,
        ),
        ModelGroup(
            name="large",
            copies=8,
            weights_gb=30,
            kv_gb=10,
            kv_mb_per_token=0.3,
            service=chat,
            slo_ttft=8,
            slo_tpot=0.2,
            replicas_max=2,
        ),
        ModelGroup(
            name="tool", copies=32, weights_gb=3, kv_gb=1, service=Fixed(seconds=0.3), slo_ttft=2, replicas_max=2, keep_alive=60
        ),
    )
    lengths = DATASETS["sharegpt"]
    traffic = Synthetic(4, 600, 4, 1.0, lengths.prompt, lengths.output, lengths.cv, each=True, models_shuffled=True)
    runtime = Runtime(startup=startup, hop_s=0.002)
    return Case(
        ClusterFile(nodes=(node,), runtime=runtime),
        models,
        traffic,
        ("serverlessllm", "torpor", "tangram", "hydraserve", "swapservellm"),
    )


CASES = {f.__name__: f for f in (serverlessllm, torpor, tangram, hydraserve, build_mixed_case)}


def speed(requests: int, policies: Sequence[str]) -> list[dict[str, Any]]:
    links = LinkSpeeds(remote=1.25, ssd=5, device=25)
    node = NodeGroup(count=4, devices=4, device_gb=48, dram_gb=512, ssd_gb=2000, links=links)
    startup = Startup(container_s=0.5, init_s=0.3, leave_s=0.05)
    service = Batching(prefill_tokens_per_second=8000, tpot_ms=20, tpot_ms_more=0.5, concurrency=16)
    models = (ModelGroup(name="m", copies=32, weights_gb=13.4, kv_gb=8, service=service, slo_ttft=10, replicas_max=4),)
    cluster = ClusterFile(nodes=(node,), runtime=Runtime(startup=startup))
    traffic = synthetic(Synthetic(20, requests / 20, 2, 1.0, 200, 130, 0.8), names_of(models), 1)
    found = []
    for name in policies:
        wall, processor = time.perf_counter(), time.process_time()
        outcome = simulate(cluster, models, traffic, PROFILES[name], 1)
        wall, processor = time.perf_counter() - wall, time.process_time() - processor
        figures = outcome.figures()
        found.append(
            {
                "policy": name,
                "requests": len(traffic),
                "requests_per_minute": round(len(traffic) / wall * 60),
                "requests_per_processor_minute": round(len(traffic) / processor * 60),
                "decisions": figures["decisions"],
                "starts": sum(figures["loads"].values()),
            }
        )
        print(json.dumps(found[-1]), flush=True)
    return found


def policies(seeds: int, only: str | None) -> list[dict[str, Any]]:
    found = []
    for case_name, make in CASES.items():
        if only not in (None, case_name):
            continue
        case = make()
        names = names_of(case.models)
        for policy in ("thaw", *case.policies):
            runs = [
                simulate(case.cluster, case.models, synthetic(case.workload, names, s), PROFILES[policy], s).figures()
                for s in range(seeds)
            ]
            measures = {
                "ttft_p99_s": [r["ttft"]["p99"] for r in runs],
                "ttft_mean_s": [r["ttft"]["mean"] for r in runs],
                "startup_p99_s": [r["startup"]["p99"] for r in runs],
                "slo_attainment": [r["slo_attainment"] for r in runs],
                "functions_compliant": [r["functions_compliant"] for r in runs],
                "device_memory_seconds": [r["device_memory_seconds"] for r in runs],
            }
            row = {"case": case_name, "policy": policy, "seeds": seeds, "requests": runs[0]["requests"]}
            for name, values in measures.items():
                middle, half = interval([v for v in values if v is not None])
                row[name] = {"mean": round(middle, 4), "half_interval": round(half, 4)}
            found.append(row)
            print(json.dumps(row), flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--only", choices=["speed", "policies", *CASES])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    document: dict[str, Any] = {"machine": machine()}
    if options.only in (None, "speed"):
        document["speed"] = speed(options.requests, ("thaw", "serverlessllm", "hydraserve", "tangram", "lru"))
    if options.only != "speed":
        document["policies"] = policies(options.seeds, None if options.only in (None, "policies") else options.only)
    if options.json:
        options.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
