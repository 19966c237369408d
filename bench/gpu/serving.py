"""The steps of `python -m bench.gpu` that serve models: each starts a mesh and asks over HTTP.

    python -m bench.gpu.serving PART --models DIRECTORY [--device cuda:0] [--rounds N]
        [--requests N] [--rate N] [--waterfall FILE] [--json PATH]

- first_token: `base` is stopped and asked again, its weights in host memory: the time to the first
               text, beside a pinned copy of its bytes at the bandwidth measured before. The engine
               starts and the weights are copied at the same time; on a GPU its layers compute after
               the last byte
- suspended:   `base` is suspended and asked again (as `bench.hot_swap`)
- reuse:       with THAW_CUDA_REUSE_BYTES: `base`, a second engine of the same weights (`twin`), and
               `tuned`, of which 80 % of the bytes are equal. For each the memory that it takes
               of the device beyond the others', and the time to the first text
- ten:         ten models, a device that books four of them, and requests at random times, popular
               models more often

All times are a client's: request sent → first text received. A device `cpu:N` with N over 0 has
memory of its own. Exit status 2: there is no such device.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from bench.gpu.models import BASE, TEN, TUNED, bytes_of
from bench.hot_swap import DEVICE, MIB, NO_DEVICE, PINNED, Figures, SwapMesh, pinned_copies, summary, swap
from bench.report import median, write
from bench.reuse_remap import copy_gb_per_s
from services.nodeagent.devices.cuda import CudaDevice, load_nvml
from shared.errors import DeviceMissing
from shared.percentiles import percentile

GIB = 1 << 30
TWIN = "twin"
CONTEXT = 1024
ENGINE_BYTES = 2 * GIB
"""Most bytes that a model books beyond its weights: KV cache, CUDA context, workspace."""
BOOKED = 4
"""Models of ten that the device has room for."""
TEXT_TOKENS = 32
_SETTLED_S, _SETTLE_WITHIN_S = 1.2, 60.0
_CLIENTS = 32
_SKEW = 1.0
"""Exponent of the Zipf distribution of requests over the ten models."""


@dataclass
class Bed:
    """The common setup of the parts: the models' directory, the device, and options.

    Attributes:
        link_gb_per_s: Measured bandwidth of copies from host memory to the device.
        waterfall: Where the phases of the last measured request are drawn.
    """

    models: Path
    device: str
    link_gb_per_s: float
    rounds: int
    requests: int
    rate: float
    waterfall: Path | None

    @property
    def is_gpu(self) -> bool:
        return self.device.startswith("cuda:")

    def entry(self, name: str, source: str | None = None) -> dict[str, Any]:
        return {"name": name, "source": str(self.models / (source or name)), "max_model_len": CONTEXT}

    @contextlib.contextmanager
    def mesh(
        self, entries: list[dict[str, Any]], budget: int, *, suspend: bool = False, reuse_bytes: int = 0
    ) -> Iterator[SwapMesh]:
        """Start a mesh whose host memory has room for all weights; stop it at the end."""
        sources = {str(e["source"]) for e in entries}
        dram = round(sum(bytes_of(Path(s)) for s in sources) * 1.1) + GIB // 4
        size = f"{budget // MIB}MiB"
        separate = not self.is_gpu and self.device != "cpu:0"
        node = {self.device: {"size": size, "memory": "separate"} if separate else size, "dram": f"{dram // MIB}MiB"}
        environment = {"THAW_CUDA_REUSE_BYTES": str(reuse_bytes)} if reuse_bytes and self.is_gpu else {}
        with tempfile.TemporaryDirectory(prefix="thaw-gpu-") as home:
            mesh = SwapMesh(Path(home) / "home", entries, self.device, budget, suspend=suspend, node=node, environment=environment)
            with contextlib.closing(mesh):
                yield mesh


def ask(figures: Figures, mesh: SwapMesh, model: str, what: str) -> float:
    """Ask for one token; note and return the milliseconds."""
    took = mesh.ask(model)[0]
    figures.add(model, what, took)
    return took


def node_of(mesh: SwapMesh) -> dict[str, Any]:
    """Return the node's view, as the cluster's status has it."""
    found: dict[str, Any] = mesh.thaw("ps")["nodes"][0]
    return found


def read_settled(read: Callable[[], int]) -> int:
    """Return a reading when it has not changed for longer than a status takes.

    Raises:
        RuntimeError: It changes all the time.
    """
    until, last = time.monotonic() + _SETTLE_WITHIN_S, read()
    while time.monotonic() < until:
        time.sleep(_SETTLED_S)
        now = read()
        if now == last:
            return now
        last = now
    raise RuntimeError("the device's memory in use changes all the time: other programs use it")


def memory_reader(mesh: SwapMesh, device: str) -> Callable[[], int]:
    """Return a reader of the bytes in use on the device.

    On a GPU it is all memory in use as NVML reports it, otherwise what the loader has copied.
    """
    if device.startswith("cuda:"):
        nvml = load_nvml()
        if nvml is None:
            raise DeviceMissing("NVML does not work here")
        gpu = CudaDevice(nvml, int(device.removeprefix("cuda:")), 0.9, None)
        return lambda: gpu.used_bytes(0, 0)
    return lambda: sum(m["copied_bytes"] for m in node_of(mesh)["loader"]["memory"] if m["device_id"] == device)


def measure_first_token(bed: Bed) -> dict[str, float]:
    """DRAM → first token of the large model."""
    figures, nbytes = Figures(), bytes_of(bed.models / BASE)
    with bed.mesh([bed.entry(BASE)], nbytes + 2 * ENGINE_BYTES) as mesh:
        ask(figures, mesh, BASE, "disk_ttft_ms")
        for _ in range(bed.rounds):
            mesh.thaw("sleep", BASE)
            ask(figures, mesh, BASE, "dram_ttft_ms")
        phases = draw_waterfall(mesh, bed.waterfall)
    copy_ms = nbytes / bed.link_gb_per_s / 1e6
    ttft = median(figures.get_values(BASE, "dram_ttft_ms"))
    return {
        "disk_ttft_ms": figures.get_values(BASE, "disk_ttft_ms")[0],
        "dram_ttft_ms": ttft,
        "copy_ms": copy_ms,
        "ttft_over_copy": ttft / copy_ms,
        "model_gb": nbytes / 1e9,
        "pinned_gb_per_s": bed.link_gb_per_s,
        **phases,
    }


def draw_waterfall(mesh: SwapMesh, path: Path | None) -> dict[str, float]:
    """Write the phases of the last request as a picture; return their milliseconds."""
    trace = mesh.thaw("trace")
    if path is not None:
        command = [sys.executable, "-m", "thaw", "trace"]
        drawn = subprocess.run(command, env=mesh.environment, capture_output=True, text=True, check=True)
        path.write_text(drawn.stdout)
    return phases_of(trace)


def phases_of(trace: Mapping[str, Any]) -> dict[str, float]:
    """Return the milliseconds that the request of a `thaw trace` waited for each phase."""
    found: dict[str, float] = {}
    for segment in trace["request"]["critical_path"]:
        name = f"last_{segment['phase']}_ms"
        found[name] = found.get(name, 0.0) + float(segment["duration_ms"])
    return found


def measure_suspended(bed: Bed) -> dict[str, float]:
    """Suspended → first token of the large model.

    Raises:
        RuntimeError: The engine was stopped instead of suspended.
    """
    figures, nbytes = Figures(), bytes_of(bed.models / BASE)
    figures.add(DEVICE, PINNED, bed.link_gb_per_s)
    with bed.mesh([bed.entry(BASE)], nbytes + 2 * ENGINE_BYTES, suspend=True) as mesh:
        swap(figures, mesh, BASE, bed.rounds)
        if len(figures.get_values(BASE, "resume_first_ttft_ms")) != 1:
            raise RuntimeError(f"{BASE} was not suspended and resumed: {mesh.instance(BASE)['cannot_suspend'] or 'see the log'}")
    prefix = f"{BASE}."
    found = {name.removeprefix(prefix): value for name, value in summary(figures).items() if name.startswith(prefix)}
    return {**found, "pinned_gb_per_s": bed.link_gb_per_s}


def measure_reuse(bed: Bed) -> dict[str, float]:
    """Equal bytes of several engines: memory and times to the first token."""
    figures, nbytes = Figures(), bytes_of(bed.models / BASE)
    entries = [bed.entry(BASE), bed.entry(TWIN, BASE), bed.entry(TUNED)]
    with bed.mesh(entries, 3 * (nbytes + ENGINE_BYTES), reuse_bytes=round(nbytes * 1.05)) as mesh:
        read, grown = memory_reader(mesh, bed.device), dict[str, int]()
        for name in (BASE, TWIN, TUNED):
            before = read_settled(read)
            ask(figures, mesh, name, "ttft_ms")
            grown[name] = read_settled(read) - before
        for _ in range(bed.rounds):
            mesh.thaw("sleep", TUNED)
            ask(figures, mesh, TUNED, "again_ttft_ms")
        running = sum(i["state"] == "ready" for i in mesh.thaw("ps")["instances"])
    if running != len(entries):
        raise RuntimeError(f"{running} engines run at the end, not {len(entries)}: some were evicted, and the figures are none")
    found = {f"{name}_grown_mb": size / 1e6 for name, size in grown.items()}
    found |= {f"{name}_ttft_ms": figures.get_values(name, "ttft_ms")[0] for name in grown}
    return found | {
        "tuned_again_ttft_ms": median(figures.get_values(TUNED, "again_ttft_ms")),
        "tuned_over_base": grown[TUNED] / grown[BASE],
        "twin_over_base": grown[TWIN] / grown[BASE],
    }


@dataclass
class Traffic:
    """Requests at random times, and their results."""

    ttft_ms: list[float] = field(default_factory=list)
    failed: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def ask(self, mesh: SwapMesh, model: str, at: float) -> None:
        """Wait until `at` on the monotonic clock, ask, and note the result."""
        time.sleep(max(0.0, at - time.monotonic()))
        try:
            took = mesh.ask(model, TEXT_TOKENS)[0]
        except (httpx.HTTPError, RuntimeError) as e:
            print(f"{model} failed: {e}", flush=True)
            with self._lock:
                self.failed += 1
        else:
            with self._lock:
                self.ttft_ms.append(took)


def arrivals(requests: int, rate: float, models: Sequence[str], seed: int = 0) -> list[tuple[float, str]]:
    """Return seconds and models of Poisson arrivals; the model of rank k is asked 1/k as often.

    Every model is asked for at least once if there are enough requests.
    """
    draw, at, found = random.Random(seed), 0.0, list[tuple[float, str]]()
    weights = [1 / rank**_SKEW for rank in range(1, len(models) + 1)]
    asked = [*models, *draw.choices(models, weights, k=max(0, requests - len(models)))][:requests]
    draw.shuffle(asked)
    for model in asked:
        at += draw.expovariate(rate)
        found.append((at, model))
    return found


def measure_ten(bed: Bed) -> dict[str, float]:
    """Ten models on a device with room for four."""
    entries = [bed.entry(name) for name in TEN]
    for entry in entries:
        entry["memory"] = bytes_of(Path(entry["source"])) + ENGINE_BYTES // 2
    budget = BOOKED * max(int(e["memory"]) for e in entries) + 64 * MIB
    traffic, seen, over = Traffic(), dict[str, int](), threading.Event()
    with bed.mesh(entries, budget, suspend=True) as mesh:

        def watch() -> None:
            while True:
                last = over.is_set()
                for view in node_of(mesh)["instances"]:
                    seen[view["instance_id"]] = max(seen.get(view["instance_id"], 0), int(view["suspension"]["resumes"]))
                if last:
                    return
                over.wait(5)

        began = time.monotonic()
        with ThreadPoolExecutor(_CLIENTS + 1) as pool:
            watching = pool.submit(watch)
            plan = arrivals(bed.requests, bed.rate, TEN)
            for done in [pool.submit(traffic.ask, mesh, model, began + at) for at, model in plan]:
                done.result()
            over.set()
            watching.result()
        seconds = time.monotonic() - began
        draw_waterfall(mesh, bed.waterfall)
    if not traffic.ttft_ms:
        raise RuntimeError("no request was answered")
    return {
        "requests": float(len(plan)),
        "failed": float(traffic.failed),
        "seconds": seconds,
        "ttft_p50_ms": percentile(traffic.ttft_ms, 50),
        "ttft_p99_ms": percentile(traffic.ttft_ms, 99),
        "starts": float(len(seen)),
        "resumes": float(sum(seen.values())),
    }


PARTS: Mapping[str, Callable[[Bed], dict[str, float]]] = {
    "first_token": measure_first_token,
    "suspended": measure_suspended,
    "reuse": measure_reuse,
    "ten": measure_ten,
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu.serving", description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--models", type=Path, required=True)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=240)
    parser.add_argument("--rate", type=float, default=2.0, help="requests per second")
    parser.add_argument("--waterfall", type=Path)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    kind, _, number = options.device.partition(":")
    try:
        link = pinned_copies(int(number)) if kind == "cuda" else copy_gb_per_s()
    except DeviceMissing as e:
        print(f"nothing measured: {e.message}")
        return NO_DEVICE
    bed = Bed(options.models, options.device, link, options.rounds, options.requests, options.rate, options.waterfall)
    found = PARTS[options.part](bed)
    for name, value in found.items():
        print(f"{name} {value:.4g}")
    write(options.json, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
