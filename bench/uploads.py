"""Time that a mesh adds to an upload: an audio file through gateway, NATS and host, and directly.

    python -m bench.uploads [--rounds N] [--mb N] [--json PATH]

The same client sends the same form to the same server of bytes, in turn: through a mesh of its own,
and directly. The server computes the file's SHA-256, which the client compares. Besides seconds,
the CPU time and the peak memory of the gateway and of the engine's host are printed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import httpx
import psutil
import uvicorn
import yaml
from rich.console import Console
from rich.table import Table
from starlette.applications import Starlette
from starlette.datastructures import UploadFile
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from bench.own_mesh import own_mesh
from bench.report import median, write
from shared.ports import free_port

ROUTE = "/v1/audio/transcriptions"
ROOT = Path(__file__).resolve().parents[1]
_SERVE = "--serve"


async def transcribe(request: Request) -> Response:
    """Answer with the digest of the file."""
    async with request.form() as form:
        file = form["file"]
        assert isinstance(file, UploadFile)
        hashed = hashlib.sha256()
        while data := await file.read(1 << 20):
            hashed.update(data)
    return JSONResponse({"text": hashed.hexdigest()})


async def complete(request: Request) -> Response:
    """Answer the host's probe."""
    await request.body()
    usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
    return JSONResponse({"choices": [{"index": 0, "text": "x", "finish_reason": "stop"}], "usage": usage})


async def report_health(request: Request) -> Response:
    return Response("ok")


def serve(port: int) -> None:
    """Run the engine."""
    routes = [
        Route(ROUTE, transcribe, methods=["POST"]),
        Route("/v1/completions", complete, methods=["POST"]),
        Route("/health", report_health),
    ]
    uvicorn.run(Starlette(routes=routes), host="127.0.0.1", port=port, log_level="warning")


def upload(port: int, sound: bytes) -> float:
    """Send the file, and return the seconds until its digest was received and compared."""
    began = time.perf_counter()
    with httpx.Client(timeout=300) as client:
        url, files = f"http://127.0.0.1:{port}{ROUTE}", {"file": ("a.wav", sound, "audio/wav")}
        answer = client.post(url, data={"model": "ear"}, files=files)
    took_s = time.perf_counter() - began
    if answer.status_code != 200 or answer.json()["text"] != hashlib.sha256(sound).hexdigest():
        raise RuntimeError(f"the upload failed: {answer.status_code} {answer.text[:500]}")
    return took_s


def peak_mib(process: psutil.Process) -> float:
    """Return the most memory that a process has had."""
    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM:"))


def processes_of(environment: dict[str, str]) -> dict[str, psutil.Process]:
    """Return the gateway, and the host of the one engine."""
    home = Path(environment["THAW_HOME"])
    services = json.loads((home / "run" / "supervisor.json").read_text())["services"]
    shown = subprocess.run([sys.executable, "-m", "thaw", "ps", "--json"], env=environment, check=True, capture_output=True)
    pids = [p for n in json.loads(shown.stdout)["nodes"] for i in n["instances"] for p in i["pids"]]
    host = next(p for p in map(psutil.Process, pids) if _SERVE not in p.cmdline())
    return {"gateway": psutil.Process(services["gateway"]["process"]["pid"]), "host": host}


def measure(rounds: int, sound: bytes, directory: Path) -> dict[str, float]:
    """Measure uploads in turn; return the medians."""
    engine = [sys.executable, "-m", "bench.uploads", _SERVE]
    model = {
        "name": "ear",
        "source": "engine://m",
        "engine": "openai",
        "memory": "300MiB",
        "max_model_len": 4096,
        "keep_alive": -1,
        "command": [*engine, "{port}"],
        "env": {"PYTHONPATH": str(ROOT)},
        "routes": [ROUTE],
    }
    config = directory / "thaw.yaml"
    config.write_text(yaml.safe_dump({"mesh": {"nodes": {"node-0": {"cpu:0": "1GiB"}}}, "models": [model]}))
    direct_port = free_port()
    direct = subprocess.Popen([*engine, str(direct_port)], cwd=ROOT)
    samples: dict[str, list[float]] = defaultdict(list)
    try:
        with own_mesh("--config", str(config)) as environment:
            endpoints = json.loads((Path(environment["THAW_HOME"]) / "run" / "endpoints.json").read_text())
            mesh_port = int(endpoints["url"].rsplit(":", 1)[1])
            for port in (mesh_port, direct_port):
                upload(port, sound[:1000])
            processes = processes_of(environment)
            before = {name: peak_mib(p) for name, p in processes.items()}
            for _ in range(rounds):
                used = {name: sum(p.cpu_times()[:2]) for name, p in processes.items()}
                samples["mesh_s"].append(upload(mesh_port, sound))
                for name, process in processes.items():
                    samples[f"{name}_cpu_s"].append(sum(process.cpu_times()[:2]) - used[name])
                samples["direct_s"].append(upload(direct_port, sound))
            grown = {f"{name}_peak_grown_mib": peak_mib(p) - before[name] for name, p in processes.items()}
    finally:
        direct.terminate()
        direct.wait()
    return {name: median(values) for name, values in samples.items()} | grown


def main() -> None:
    if sys.argv[1:2] == [_SERVE]:
        serve(int(sys.argv[2]))
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--mb", type=int, default=100)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    sound = os.urandom(1_000_000) * options.mb
    with tempfile.TemporaryDirectory(prefix="thaw-bench-") as directory:
        found = measure(options.rounds, sound, Path(directory))
    table = Table("figure", "median")
    for name, value in found.items():
        table.add_row(name, f"{value:.2f}")
    for way in ("mesh", "direct"):
        table.add_row(f"{way}_mb_per_s", f"{options.mb / found[f'{way}_s']:.0f}")
    Console().print(table)
    write(options.json, found)


if __name__ == "__main__":
    main()
