"""Shared executors against a process for each instance: cold TTFT, and throughput of busy models.

    python -m bench.isolation [--models 5m,60m,250m] [--rounds N] [--busy 5m,60m] [--json PATH]

A mesh has each model twice, with the same weights: `isolation: shared` and `dedicated`. A round
asks both for a token after an eviction, in alternating order: first with the weights in host memory
(`memory`), then in a mesh that keeps none there and loads them from the file (`file`, page cache
warm). The executor runs and knows the architecture, the zygote has its imports done.

Then two models of each size in --busy answer four streams each at the same time, both ways in
alternating order. The figures are medians; ratios above 1 mean that shared is better.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import yaml

from bench.cold_path import BenchMesh
from bench.report import machine, median, write
from shared.ports import free_port
from thaw.demo.models import make_demo_model

WAYS = ("shared", "dedicated")
_STREAMS = 4
_TOKENS = 64


class IsolationMesh(BenchMesh):
    """A mesh with each model both ways."""

    def __init__(self, home: Path, models: dict[str, Path], **environment: str) -> None:
        self.environment = {**os.environ, "THAW_HOME": str(home), "THAW_SUSPEND": "off", **environment}
        entries = [{"name": f"{n}-{way}", "source": str(p), "isolation": way} for n, p in models.items() for way in WAYS]
        config = home.parent / f"{home.name}.yaml"
        mesh = {"port": free_port(), "nodes": {"node-0": {"cpu:0": "6GiB"}}}
        config.write_text(yaml.safe_dump({"mesh": mesh, "defaults": {"keep_alive": -1}, "models": entries}))
        self.url = str(self.thaw("up", "--detach", "--config", str(config))["endpoint"])
        self.http = httpx.Client(base_url=self.url, timeout=300)

    def busy_tokens_per_s(self, names: list[str]) -> float:
        """Return the tokens per second of all models together, each with several requests."""
        body = {"prompt": "Once upon a time", "max_tokens": _TOKENS, "temperature": 0, "ignore_eos": True}
        began = time.perf_counter()
        with ThreadPoolExecutor(_STREAMS * len(names)) as pool:
            answers = list(pool.map(lambda name: self.http.post("/completions", json={**body, "model": name}), names * _STREAMS))
        took_s = time.perf_counter() - began
        return sum(int(answer.raise_for_status().json()["usage"]["completion_tokens"]) for answer in answers) / took_s


def _turns(rounds: int) -> Iterator[tuple[str, ...]]:
    for number in range(rounds):
        yield WAYS if number % 2 else WAYS[::-1]


def measure_starts(mesh: IsolationMesh, models: list[str], rounds: int) -> dict[str, list[float]]:
    """Return the milliseconds of cold starts by model and way. The first of each does not count."""
    found: dict[str, list[float]] = defaultdict(list)
    for number, turn in enumerate(_turns(rounds + 1)):
        for model in models:
            for way in turn:
                name = f"{model}-{way}"
                if number:
                    mesh.thaw("sleep", name)
                ttft_ms, _ = mesh.ttft(name)
                if number:
                    found[name].append(ttft_ms)
    return found


def run(options: argparse.Namespace, root: Path) -> dict[str, float]:
    busy, sizes = options.busy.split(","), options.models.split(",")
    models = {size: make_demo_model(root / size, size, 1) for size in {*sizes, *busy}}
    others = {f"{size}b": make_demo_model(root / f"{size}b", size, 2) for size in busy}
    figures: dict[str, float] = {}
    for tier, environment in (("memory", {}), ("file", {"THAW_DRAM_BYTES": "0"})):
        with contextlib.closing(IsolationMesh(root / tier, {**models, **others}, **environment)) as mesh:
            mesh.ttft(f"{busy[0]}b-shared")  # the executor runs throughout
            starts = measure_starts(mesh, sizes, options.rounds)
            for size in sizes:
                for way in WAYS:
                    figures[f"{size}.{tier}.{way}.ttft_ms"] = median(starts[f"{size}-{way}"])
                pairs = zip(starts[f"{size}-dedicated"], starts[f"{size}-shared"], strict=True)
                figures[f"{size}.{tier}.dedicated_to_shared_ttft"] = median([d / s for d, s in pairs])
            if tier == "memory":
                figures |= measure_busy(mesh, busy, options.rounds)
    return figures


def measure_busy(mesh: IsolationMesh, sizes: list[str], rounds: int) -> dict[str, float]:
    """Return the tokens per second of two busy models, by size and way."""
    figures: dict[str, float] = {}
    for size in sizes:
        rates: dict[str, list[float]] = defaultdict(list)
        for number, turn in enumerate(_turns(rounds + 1)):
            for way in turn:
                rate = mesh.busy_tokens_per_s([f"{size}-{way}", f"{size}b-{way}"])
                if number:
                    rates[way].append(rate)
        figures |= {f"{size}.busy.{way}.tokens_per_s": median(rates[way]) for way in WAYS}
        pairs = zip(rates["shared"], rates["dedicated"], strict=True)
        figures[f"{size}.busy.shared_to_dedicated_rate"] = median([s / d for s, d in pairs])
    return figures


def main() -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="5m,60m,250m")
    parser.add_argument("--busy", default="5m,60m")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    print(json.dumps(machine()), file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix="thaw-iso-") as directory:
        figures = run(options, Path(directory))
    for name, value in figures.items():
        print(f"{name:42} {value:10.2f}")
    write(options.json, figures)


if __name__ == "__main__":
    main()
