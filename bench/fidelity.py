"""How close the simulator is to the mesh: a run of the real one is recorded and replayed with
parameters that were measured in it.

    python -m bench.fidelity [--seconds 240] [--rps 0.3] [--cv 2] [--seed 1] [--keep DIRECTORY]
        [--json PATH]
    python -m bench.fidelity --replay DIRECTORY…
        replays the traces of `--keep`; those of several, also with each other's parameters

A mesh of one node whose device holds two of three models serves a drawn workload;
`thaw trace --export` records it. `simulate --mesh` replays it: production `decide`, the mesh's own
messages. What a message, a decision, each phase of a start, a prompt, a token and leaving take are
means of the run. Printed are both TTFT, in all, of cold and of warm requests, and of cold ones by
phase of the critical path.
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
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import yaml

from bench import reuse_models
from bench.fidelity_replay import NAMES, SeparateDevices, compare_replay, mean_of, measure_parameters
from bench.report import machine
from shared.contracts.models import ModelSpec
from shared.contracts.traces import LoadTrace, RequestTrace
from shared.ports import free_port
from simulator.workloads.request import Request
from simulator.workloads.synthetic import Synthetic, synthetic
from thaw.cli.demo import budget_for_two
from thaw.demo.models import make_demo_model
from weights.store.units import PAGE_BYTES

HOST_BANDWIDTH, PEER_BANDWIDTH = "300MB/s", "600MB/s"
ENGINE_BYTES = 160 << 20
FIRST = "first"
"""A model that is asked for before anything is recorded."""


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


def workload(rps: float, seconds: float, cv: float, seed: int) -> list[Request]:
    return synthetic(Synthetic(rps, seconds, cv, zipf=0.5, prompt_tokens=20, output_tokens=16), NAMES, seed)


def make_bed(count: int, model: Path) -> SeparateDevices:
    """Return one device for two of three models, or two devices for one each.

    Half a model is to spare, because pages that a model does not fill are booked too.
    """
    weights = reuse_models.pages(model) * PAGE_BYTES
    booked = weights + ENGINE_BYTES
    return SeparateDevices(count, weights, booked, booked * (5 if count == 1 else 3) // 2)


def separate_devices(found: SeparateDevices) -> dict[str, Any]:
    """Return the devices for thaw.yaml, paced."""
    first: dict[str, Any] = {"size": found.device, "memory": "separate", "bandwidth": HOST_BANDWIDTH}
    second = {**first, "bandwidth": {"host": HOST_BANDWIDTH, "cpu:1": PEER_BANDWIDTH}}
    return {"cpu:1": first, "cpu:2": second} if found.count == 2 else {"cpu:1": first}


class Mesh:
    """A mesh of its own in a temporary home, through the public command line and API."""

    def __init__(self, home: Path, suspend: bool = False, separate: int = 0) -> None:
        self.home = home
        self.environment = {
            **os.environ,
            "THAW_HOME": str(home),
            "THAW_SUSPEND": "auto" if suspend else "off",
            "THAW_ENGINE_THREADS": "1",
        }
        size = replace(reuse_models.SHAPE, layers=12) if separate else "5m"
        sources = [str(make_demo_model(home / "models" / n, size, seed=i)) for i, n in enumerate((*NAMES, FIRST))]
        self.separate = make_bed(separate, Path(sources[0])) if separate else None
        booked = self.separate.booked if self.separate else None
        specs = tuple(ModelSpec(name=n, source=s, memory=booked) for n, s in zip((*NAMES, FIRST), sources, strict=True))
        port = free_port()
        config = home / "thaw.yaml"
        devices = separate_devices(self.separate) if self.separate else {"cpu:0": budget_for_two(specs[:3])}
        models = [{"name": s.name, "source": s.source, **({"memory": booked} if booked else {})} for s in specs]
        document = {
            "mesh": {"port": port, "nodes": {"node-0": devices}},
            "defaults": {"keep_alive": -1},
            "models": models,
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


def filter_export(path: Path) -> None:
    """Leave in an export what asked for one of `NAMES`, in the order of arrival."""
    found = [RequestTrace.model_validate_json(line) for line in path.read_text().splitlines()]
    mine = sorted((t for t in found if t.model in NAMES), key=lambda t: t.received)
    path.write_text("".join(t.model_dump_json() + "\n" for t in mine))


def collect_traces(url: str, admin_key: str, export: Path) -> tuple[list[RequestTrace], list[LoadTrace]]:
    """The exported requests, and the starts that they waited for."""
    traces = [RequestTrace.model_validate_json(line) for line in export.read_text().splitlines()]
    loads = []
    with httpx.Client(base_url=f"{url}/admin/v1", headers={"authorization": f"Bearer {admin_key}"}, timeout=120) as admin:
        for plan in dict.fromkeys(t.load_plan_id for t in traces if t.load_plan_id):
            answer = admin.get(f"/traces/loads/{plan}")
            if answer.status_code == 200:
                loads.append(LoadTrace.model_validate_json(answer.content))
    return traces, loads


def run(options: argparse.Namespace, directory: Path) -> None:
    """Record a mesh that serves the workload.

    `directory` gets `run.jsonl`, as exported, and `loads.jsonl`.
    """
    requests = workload(options.rps, options.seconds, options.cv, options.seed)
    with tempfile.TemporaryDirectory(prefix="thaw-fidelity-") as temporary:
        home = Path(temporary) / "home"
        home.mkdir()
        mesh = Mesh(home, options.suspend, options.separate)
        try:
            # The first start of all has the zygote's own in it: another model's, of which nothing
            # is left when the recording begins.
            asyncio.run(drive(mesh.url, [Request(0.0, FIRST, 20, 2)]))
            mesh.thaw("sleep", FIRST)
            mesh.thaw("models", "rm", FIRST)
            asyncio.run(drive(mesh.url, requests))
            export = directory / "run.jsonl"
            mesh.thaw("trace", "--export", str(export))
            filter_export(export)
            endpoints = json.loads((home / "run" / "endpoints.json").read_text())
            _, loads = collect_traces(mesh.url, endpoints["admin_key"], export)
        finally:
            mesh.thaw("down")
    if mesh.separate is not None:
        (directory / "separate.json").write_text(json.dumps(asdict(mesh.separate)) + "\n")
    (directory / "loads.jsonl").write_text("".join(load.model_dump_json() + "\n" for load in loads))


def read_traces(directory: Path) -> tuple[list[RequestTrace], list[LoadTrace]]:
    """What `run` recorded there."""
    lines = [(directory / name).read_text().splitlines() for name in ("run.jsonl", "loads.jsonl")]
    return [RequestTrace.model_validate_json(n) for n in lines[0]], [LoadTrace.model_validate_json(n) for n in lines[1]]


def kept_devices(directory: Path) -> SeparateDevices | None:
    """Return the devices of a recorded run, if they have memory of their own."""
    path = directory / "separate.json"
    return SeparateDevices(**json.loads(path.read_text())) if path.exists() else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=240)
    parser.add_argument("--rps", type=float, default=0.3)
    parser.add_argument("--cv", type=float, default=2.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--suspend", action="store_true", help="Engines that leave are suspended where that is the sooner way back."
    )
    parser.add_argument(
        "--separate",
        type=int,
        choices=(0, 1, 2),
        default=0,
        help="cpu devices with memory of their own, paced: weights are reused, and computing overlaps loading",
    )
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--replay", type=Path, nargs="+")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.replay:
        runs = [replay_run(directory, [d for d in options.replay if d is not directory]) for directory in options.replay]
    else:
        with tempfile.TemporaryDirectory(prefix="thaw-fidelity-") as temporary:
            directory = options.keep or Path(temporary)
            directory.mkdir(parents=True, exist_ok=True)
            chosen = {name: getattr(options, name) for name in ("seconds", "rps", "cv", "seed", "suspend", "separate")}
            (directory / "workload.json").write_text(json.dumps(chosen) + "\n")
            run(options, directory)
            runs = [replay_run(directory, [])]
    document = {"machine": machine(), "runs": runs}
    print(json.dumps(document, indent=1))
    if options.json:
        options.json.write_text(json.dumps(document, indent=1) + "\n")


def replay_run(directory: Path, others: Sequence[Path]) -> dict[str, Any]:
    """Replay a run by its own parameters, and by the means of other runs' parameters.

    The latter is a prediction.
    """
    (traces, loads), separate = read_traces(directory), kept_devices(directory)
    compare = partial(compare_replay, traces, loads, directory / "run.jsonl", separate=separate)
    found = {"workload": json.loads((directory / "workload.json").read_text()), **compare()}
    if others:
        given = mean_of([measure_parameters(*read_traces(d), kept_devices(d)) for d in others])
        found["ttft_mean_s_by_other_runs"] = compare(given)["ttft_mean_s"]
    return found


if __name__ == "__main__":
    main()
