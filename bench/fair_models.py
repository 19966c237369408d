"""A key that floods many models of a device, beside a key that uses one.

    python -m bench.fair_models [--parts resident,cold] [--rounds N] [--seconds S] [--json PATH]

Key A keeps two requests running for each of five models; key B sends one request after another to a
sixth model. All six run in one executor of a cpu device. A round measures B alone, B beside A
(`shares`), and the same traffic with A's key for all requests (`one_key`), so that only the shares
differ; the order of the three is reversed in every second round.

- `resident`: all models have memory, and compete for compute time.
- `cold`: the device has room for two of them, so that models wait for each other's memory.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import yaml

from bench.cold_path import BenchMesh
from bench.report import machine, write
from shared.percentiles import percentile
from shared.ports import free_port
from thaw.demo.models import make_demo_model

FLOODED = 5
_STREAMS = 2
_SIZE = "5m"
KEY_A, KEY_B = "sk-flood", "sk-other"
_BUDGETS = {"resident": "6GiB", "cold": "300MiB"}
_CASES = ("alone", "shares", "one_key")
_TOKENS = {"resident": 32, "cold": 4}


@dataclass
class Seen:
    """Measurements of A's and B's requests in one case."""

    ttft_ms: list[float] = field(default_factory=list)
    total_ms: list[float] = field(default_factory=list)
    flood_tokens: int = 0
    lasted_s: float = 0.0


class FairMesh(BenchMesh):
    """A mesh whose device has the models, and two keys."""

    def __init__(self, home: Path, models: dict[str, Path], budget: str) -> None:
        self.environment = {**os.environ, "THAW_HOME": str(home), "THAW_SUSPEND": "off"}
        entries = [{"name": name, "source": str(path), "isolation": "shared"} for name, path in models.items()]
        config = home.parent / f"{home.name}.yaml"
        mesh = {"port": free_port(), "nodes": {"node-0": {"cpu:0": budget}}}
        keys = [{"name": name, "key": key} for name, key in (("flood", KEY_A), ("other", KEY_B))]
        config.write_text(yaml.safe_dump({"mesh": mesh, "defaults": {"keep_alive": -1}, "models": entries, "keys": keys}))
        self.url = str(self.thaw("up", "--detach", "--config", str(config))["endpoint"])
        self.http = httpx.Client(base_url=self.url, timeout=300)


async def _stream(client: httpx.AsyncClient, model: str, key: str, tokens: int) -> tuple[float, float, int]:
    """Return the milliseconds to the first token and to the end, and the number of tokens."""
    body = {"model": model, "prompt": "Once", "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    began = time.perf_counter()
    first, count = None, 0
    headers = {"authorization": f"Bearer {key}"}
    async with client.stream("POST", "/completions", json=body, headers=headers) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if '"error"' in line:
                raise RuntimeError(line)
            if '"text"' in line:
                count += 1
                first = first or time.perf_counter()
    ended = time.perf_counter()
    return ((first or ended) - began) * 1e3, (ended - began) * 1e3, count


async def measure(url: str, case: str, seconds: float, tokens: int) -> Seen:
    """Measure one case."""
    seen = Seen()
    limits = httpx.Limits(max_connections=64)
    async with httpx.AsyncClient(base_url=url, timeout=300, limits=limits) as client:
        ended = False

        async def flood(model: str) -> None:
            while not ended:
                _, _, count = await _stream(client, model, KEY_A, tokens)
                seen.flood_tokens += count

        floods = [asyncio.create_task(flood(f"m{n}")) for n in range(FLOODED) for _ in range(_STREAMS) if case != "alone"]
        await asyncio.sleep(1.0 if floods else 0.0)
        began, before = time.perf_counter(), seen.flood_tokens
        while time.perf_counter() < began + seconds:
            ttft_ms, total_ms, _ = await _stream(client, "other", KEY_A if case == "one_key" else KEY_B, tokens)
            seen.ttft_ms.append(ttft_ms)
            seen.total_ms.append(total_ms)
        seen.lasted_s = time.perf_counter() - began
        seen.flood_tokens -= before
        ended = True
        await asyncio.gather(*floods)
    return seen


def measure_part(mesh: FairMesh, part: str, rounds: int, seconds: float) -> dict[str, float]:
    """Return the figures of one mesh, from all rounds together."""
    found = {case: Seen() for case in _CASES}
    for number in range(rounds + 1):
        for case in _CASES[:: 1 if number % 2 else -1]:
            seen = asyncio.run(measure(mesh.url, case, seconds if number else 1.0, _TOKENS[part]))
            if number:  # the first round warms up
                found[case].ttft_ms += seen.ttft_ms
                found[case].total_ms += seen.total_ms
                found[case].flood_tokens += seen.flood_tokens
                found[case].lasted_s += seen.lasted_s
    figures: dict[str, float] = {}
    for case, seen in found.items():
        figures |= {
            f"{part}.{case}.requests_per_s": len(seen.total_ms) / seen.lasted_s,
            f"{part}.{case}.ttft_p50_ms": percentile(seen.ttft_ms, 50),
            f"{part}.{case}.ttft_p99_ms": percentile(seen.ttft_ms, 99),
            f"{part}.{case}.total_p50_ms": percentile(seen.total_ms, 50),
            f"{part}.{case}.flood_tokens_per_s": seen.flood_tokens / seen.lasted_s,
        }
    for what in ("ttft_p50_ms", "ttft_p99_ms", "total_p50_ms"):
        figures[f"{part}.{what}_ratio"] = figures[f"{part}.shares.{what}"] / figures[f"{part}.one_key.{what}"]
    return figures


def main(arguments: Sequence[str] | None = None) -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default="resident,cold")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=6.0, help="of each case")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    print(json.dumps(machine()), file=sys.stderr)
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="thaw-fair-") as directory:
        root = Path(directory)
        models = {
            name: make_demo_model(root / name, _SIZE, n) for n, name in enumerate([*(f"m{n}" for n in range(FLOODED)), "other"])
        }
        for part in options.parts.split(","):
            with contextlib.closing(FairMesh(root / part, models, _BUDGETS[part])) as mesh:
                figures |= measure_part(mesh, part, options.rounds, options.seconds)
    for name, value in figures.items():
        print(f"{name:34} {value:10.2f}")
    write(options.json, figures)


if __name__ == "__main__":
    main()
