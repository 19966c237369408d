"""How close the simulator is to the mesh: a run of a mesh is recorded, and the simulator replays it
with parameters that were measured in the run.

    python -m bench.fidelity [--seconds 240] [--rps 0.3] [--cv 2] [--seed 1] [--keep DIRECTORY]
        [--json PATH]
    python -m bench.fidelity --replay DIRECTORY…
        replays runs that were kept with `--keep`; of several, each also with the others' parameters

A mesh of one node whose device has room for two of three models serves a random workload;
`thaw trace --export` records it. `simulate --mesh` replays it with production `decide` and the
mesh's own messages. Its parameters are means of the recorded run: the durations of a message, a
decision, each phase of a start, a prompt, a token, and a victim's teardown. The output compares the
TTFT of the mesh and of the simulator: of all requests, of cold ones, of warm ones, and of cold ones
by phase of the critical path.
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
"""A model that is started before the recording begins."""


async def drive(url: str, requests: Sequence[Request]) -> None:
    """Send each request when it is due, whether or not earlier ones have been answered."""
    limits = httpx.Limits(max_connections=200)
    async with httpx.AsyncClient(base_url=url, timeout=300, limits=limits) as http, asyncio.TaskGroup() as group:
        await http.get("/health")  # the time to connect is not part of a TTFT
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


def size_devices(count: int, model: Path) -> SeparateDevices:
    """Return the sizes of one device with room for two models, or of two with room for one each.

    A device has room for half a model more, because a partly filled page is booked as a whole.
    """
    weights = reuse_models.pages(model) * PAGE_BYTES
    booked = weights + ENGINE_BYTES
    return SeparateDevices(count, weights, booked, booked * (5 if count == 1 else 3) // 2)


def device_settings(devices: SeparateDevices) -> dict[str, Any]:
    """Return the devices as thaw.yaml lists them, with limited bandwidths."""
    first: dict[str, Any] = {"size": devices.device, "memory": "separate", "bandwidth": HOST_BANDWIDTH}
    second = {**first, "bandwidth": {"host": HOST_BANDWIDTH, "cpu:1": PEER_BANDWIDTH}}
    return {"cpu:1": first, "cpu:2": second} if devices.count == 2 else {"cpu:1": first}


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
        self.separate = size_devices(separate, Path(sources[0])) if separate else None
        booked = self.separate.booked if self.separate else None
        specs = tuple(ModelSpec(name=n, source=s, memory=booked) for n, s in zip((*NAMES, FIRST), sources, strict=True))
        port = free_port()
        config = home / "thaw.yaml"
        devices = device_settings(self.separate) if self.separate else {"cpu:0": budget_for_two(specs[:3])}
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
    """Keep only requests for `NAMES` in an exported file, in the order of arrival."""
    found = [RequestTrace.model_validate_json(line) for line in path.read_text().splitlines()]
    mine = sorted((t for t in found if t.model in NAMES), key=lambda t: t.received)
    path.write_text("".join(t.model_dump_json() + "\n" for t in mine))


def collect_traces(url: str, admin_key: str, export: Path) -> tuple[list[RequestTrace], list[LoadTrace]]:
    """Return the exported requests, and the starts that they waited for."""
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

    Writes `run.jsonl`, as exported, and `loads.jsonl` to `directory`; with --separate also
    `separate.json`.
    """
    requests = workload(options.rps, options.seconds, options.cv, options.seed)
    with tempfile.TemporaryDirectory(prefix="thaw-fidelity-") as temporary:
        home = Path(temporary) / "home"
        home.mkdir()
        mesh = Mesh(home, options.suspend, options.separate)
        try:
            # The first start of a mesh includes the start of the zygote. A model that is removed
            # before the recording has it.
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
    """Read the requests and the starts that `run` has written."""
    lines = [(directory / name).read_text().splitlines() for name in ("run.jsonl", "loads.jsonl")]
    return [RequestTrace.model_validate_json(n) for n in lines[0]], [LoadTrace.model_validate_json(n) for n in lines[1]]


def read_devices(directory: Path) -> SeparateDevices | None:
    """Read the devices of a recorded run; None if they have no memory of their own."""
    path = directory / "separate.json"
    return SeparateDevices(**json.loads(path.read_text())) if path.exists() else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=240)
    parser.add_argument("--rps", type=float, default=0.3)
    parser.add_argument("--cv", type=float, default=2.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--suspend", action="store_true", help="suspend victims whose engine resumes sooner than a new one starts")
    parser.add_argument(
        "--separate",
        type=int,
        choices=(0, 1, 2),
        default=0,
        help="number of cpu devices with memory of their own: weights are reused, and computing overlaps loading",
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
    """Replay a run with its own parameters, and with the means of other runs' parameters.

    The latter is a prediction.
    """
    (traces, loads), separate = read_traces(directory), read_devices(directory)
    compare = partial(compare_replay, traces, loads, directory / "run.jsonl", separate=separate)
    found = {"workload": json.loads((directory / "workload.json").read_text()), **compare()}
    if others:
        given = mean_of([measure_parameters(*read_traces(d), read_devices(d)) for d in others])
        found["ttft_mean_s_by_other_runs"] = compare(given)["ttft_mean_s"]
    return found


if __name__ == "__main__":
    main()
