"""How near the simulator comes to the mesh: a run of the real one is recorded and replayed with parameters that were measured in it.

    python -m bench.fidelity [--seconds 240] [--rps 0.3] [--cv 2] [--seed 1] [--json PATH]

A mesh of one node whose device holds two of three models serves a drawn workload; `thaw trace --export` records it. `simulate --mesh` replays it:
production `decide`, the mesh's own messages. What a prompt, a token and leaving take are medians of the run.
What starts take is told twice: as recorded, start by start (then queues, evictions and who waits for whom are compared), and as their median.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

import httpx
import yaml

from bench.report import machine
from services.scheduler.domain.policies.profiles import profile_named
from services.scheduler.simulation.config import Batching, ClusterFile, LinkSpeeds, ModelGroup, NodeGroup, Runtime, Startup
from services.scheduler.simulation.mesh.run import Simulation
from services.scheduler.simulation.workloads.request import Request
from services.scheduler.simulation.workloads.synthetic import Synthetic, synthetic
from services.scheduler.simulation.workloads.traces import read_trace
from shared.contracts.models import ModelSpec
from shared.contracts.phases import Phase
from shared.contracts.traces import LoadTrace, RequestTrace
from thaw.cli.demo import budget_for_two
from thaw.demo.models import make_demo_model
from thaw.launcher.plan import free_port

NAMES = ("one", "two", "three")
FAST = 100.0
"""GB/s of links that measured starts have in them already."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Seconds. Medians of the requests and starts that they were taken from."""

    start: float
    leave: float
    prompt: float
    token: float


async def drive(url: str, requests: Sequence[Request]) -> None:
    """Send requests when they are due, whatever became of those before."""
    limits = httpx.Limits(max_connections=200)
    async with httpx.AsyncClient(base_url=url, timeout=300, limits=limits) as http, asyncio.TaskGroup() as group:
        await http.get("/health")  # making a connection is not part of a TTFT
        began = asyncio.get_running_loop().time()
        for request in requests:
            await asyncio.sleep(max(0.0, began + request.at - asyncio.get_running_loop().time()))
            group.create_task(_ask(http, request), name=f"ask {request.at}")


async def _ask(http: httpx.AsyncClient, request: Request) -> None:
    content = "winter " * max(1, request.prompt_tokens // 2)
    body = {
        "model": request.model,
        "messages": [{"role": "user", "content": content}],
        "max_tokens": request.output_tokens,
        "temperature": 0,
        "stream": True,
        "ignore_eos": True,
    }
    async with http.stream("POST", "/v1/chat/completions", json=body) as response:
        if response.status_code != 200:
            raise RuntimeError(f"{response.status_code}: {(await response.aread())[:300]!r}")
        async for _ in response.aiter_lines():
            pass


def measured(traces: Sequence[RequestTrace], loads: Sequence[LoadTrace]) -> Measured:
    """What the parameters are, by what was recorded."""
    warm = [t for t in traces if not t.cold and t.ttft_ms is not None]
    if not warm or not loads:
        raise ValueError("the recorded run has no warm request, or no start: nothing can be measured from it")
    spans = [[s.duration_ms for s in load.spans if s.phase is Phase.RESERVE and s.process == "scheduler"] for load in loads]
    waited = [sum(found) for found in spans if found]
    tokens = [
        (t.duration_ms - t.ttft_ms) / (t.completion_tokens - 1) for t in traces if t.ttft_ms is not None and t.completion_tokens > 1
    ]
    prompt = median(t.ttft_ms for t in warm if t.ttft_ms is not None)
    took = {load.plan_id: load.duration_ms for load in loads}
    # What a start takes beside what the scheduler timed: demand on its way, the route's change, the gateway.
    around = [t.ttft_ms - took[t.load_plan_id] - prompt for t in traces if t.ttft_ms is not None and t.load_plan_id in took]
    return Measured(
        median(start_seconds(load) for load in loads) + max(0.0, median(around)) / 1e3,
        median(waited) / 1e3 if waited else 0.0,
        prompt / 1e3,
        max(median(tokens), 0.01) / 1e3,
    )


def machines(m: Measured) -> tuple[ClusterFile, tuple[ModelGroup, ...]]:
    """One device for two of three models; starts, prompts and tokens take what was measured."""
    links = LinkSpeeds(remote=FAST, ssd=FAST, device=FAST)
    node = NodeGroup(devices=1, device_gb=2.5, dram_gb=10, ssd_gb=10, links=links)
    cluster = ClusterFile(nodes=(node,), runtime=Runtime(startup=Startup(container_s=m.start, leave_s=m.leave)))
    service = Batching(prefill_tokens_per_second=1e9, prefill_ms=m.prompt * 1e3, tpot_ms=m.token * 1e3, concurrency=16)
    return cluster, tuple(ModelGroup(name=n, weights_gb=1.0, service=service, slo_ttft=10, keep_alive=-1) for n in NAMES)


def compared(traces: Sequence[RequestTrace], loads: Sequence[LoadTrace], export: Path) -> dict[str, Any]:
    """Mean TTFT of the recorded run and of its replays."""
    m = measured(traces, loads)
    cluster, models = machines(m)
    requests = read_trace(export, NAMES)
    starts = [start_seconds(load) for load in sorted(loads, key=lambda load: load.created)]
    replayed = {
        "by_start": Simulation(cluster, models, profile_named("thaw"), starts).run(requests),
        "by_median": Simulation(cluster, models, profile_named("thaw")).run(requests),
    }
    real = [t.ttft_ms / 1e3 for t in traces if t.ttft_ms is not None]
    return {
        "requests": len(real),
        "parameters_s": {"start": m.start, "leave": m.leave, "prompt": m.prompt, "token": m.token, "starts": starts},
        "cold": {"mesh": sum(t.cold for t in traces)} | {n: sum(s.queued > 1e-6 for s in o.served) for n, o in replayed.items()},
        "starts": {"mesh": len(loads)} | {n: sum(o.loads.values()) for n, o in replayed.items()},
        "ttft_mean_s": {n: _pair(real, [s.ttft for s in o.served]) for n, o in replayed.items()},
    }


def start_seconds(load: LoadTrace) -> float:
    """From the scheduler hearing of it to ready, without waiting for room."""
    return max(0.0, load.duration_ms - sum(s.duration_ms for s in load.spans if s.phase is Phase.RESERVE)) / 1e3


def _pair(real: Sequence[float], replayed: Sequence[float]) -> dict[str, float]:
    mesh, simulator = fmean(real), fmean(replayed)
    return {"mesh": mesh, "simulator": simulator, "error": simulator / mesh - 1}


def workload(rps: float, seconds: float, cv: float, seed: int) -> list[Request]:
    return synthetic(Synthetic(rps, seconds, cv, zipf=0.5, prompt_tokens=20, output_tokens=16), NAMES, seed)


class Mesh:
    """A mesh of its own in a temporary home, through the public command line and API."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.environment = {**os.environ, "THAW_HOME": str(home), "THAW_SUSPEND": "off", "THAW_ENGINE_THREADS": "1"}
        specs = tuple(
            ModelSpec(name=n, source=str(make_demo_model(home / "models" / n, "5m", seed=i))) for i, n in enumerate(NAMES)
        )
        port = free_port()
        config = home / "thaw.yaml"
        document = {
            "mesh": {"port": port, "nodes": {"node-0": {"cpu:0": budget_for_two(specs)}}},
            "defaults": {"keep_alive": -1},
            "models": [{"name": s.name, "source": s.source} for s in specs],
        }
        config.write_text(yaml.safe_dump(document))
        self.thaw("up", "--detach", "--config", str(config))
        self.url = f"http://127.0.0.1:{port}"

    def thaw(self, *arguments: str) -> Any:
        done = subprocess.run(
            [sys.executable, "-m", "thaw", *arguments, "--json"], env=self.environment, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise RuntimeError(f"thaw {' '.join(arguments)}: {done.stdout} {done.stderr[-2000:]}")
        return json.loads(done.stdout)


def recorded(url: str, admin_key: str, export: Path) -> tuple[list[RequestTrace], list[LoadTrace]]:
    """The exported requests, and the starts that they waited for."""
    traces = [RequestTrace.model_validate_json(line) for line in export.read_text().splitlines()]
    loads = []
    with httpx.Client(base_url=f"{url}/admin/v1", headers={"authorization": f"Bearer {admin_key}"}) as admin:
        for plan in dict.fromkeys(t.load_plan_id for t in traces if t.load_plan_id):
            answer = admin.get(f"/traces/loads/{plan}")
            if answer.status_code == 200:
                loads.append(LoadTrace.model_validate_json(answer.content))
    return traces, loads


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=240)
    parser.add_argument("--rps", type=float, default=0.3)
    parser.add_argument("--cv", type=float, default=2.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    requests = workload(options.rps, options.seconds, options.cv, options.seed)
    with tempfile.TemporaryDirectory(prefix="thaw-fidelity-") as directory:
        home = Path(directory) / "home"
        home.mkdir()
        mesh = Mesh(home)
        try:
            # The first start of all has the zygote's own in it: it is over before anything is recorded, and the device is empty again.
            asyncio.run(drive(mesh.url, [Request(0.0, name, 20, 2) for name in NAMES]))
            for name in NAMES:
                mesh.thaw("sleep", name)
            asyncio.run(drive(mesh.url, requests))
            export = Path(directory) / "run.jsonl"
            mesh.thaw("trace", "--export", str(export))
            lines = sorted(export.read_text().splitlines(), key=lambda line: RequestTrace.model_validate_json(line).received)
            export.write_text("\n".join(lines[len(NAMES) :]) + "\n")
            endpoints = json.loads((home / "run" / "endpoints.json").read_text())
            found = compared(*recorded(mesh.url, endpoints["admin_key"], export), export)
        finally:
            mesh.thaw("down")
    document = {"machine": machine(), "workload": vars(options) | {"json": None}, **found}
    print(json.dumps(document, indent=1, default=str))
    if options.json:
        options.json.write_text(json.dumps(document, indent=1, default=str) + "\n")


if __name__ == "__main__":
    main()
