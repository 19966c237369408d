"""Measure the cost of a running batch to interactive requests of the same device.

    python -m bench.batch_latency [--rounds N] [--seconds S] [--rate R] [--prompt T]
        [--cases alone,same,other] [--json PATH]

Two models run in one executor of a cpu device. Interactive requests of one model are sent at random
times (Poisson), each with a prompt of its own. A round measures them without a batch (`alone`),
beside a batch of the same model (`same`) and beside a batch of the other model (`other`); the order
is reversed in every second round. A batch has more lines than a case has time for, and is cancelled
at the case's end. TTFT is the time to the first token, TPOT the time between two later tokens.
`tokens_per_s` counts both kinds of requests. With `--prompt` the prompts of the batch have about T
tokens, so that its prefill competes as well.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
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

_SIZE = "5m"
_CASES = ("alone", "same", "other")
_TOKENS = 24
"""Tokens of an interactive response."""
_BATCH_TOKENS = 64
_LINES = 2000
_WARM_S = 2.0
"""Time in which the batch fills its places before the interactive requests begin."""


@dataclass
class Seen:
    """Measurements of one case; times in milliseconds."""

    ttft_ms: list[float] = field(default_factory=list)
    tpot_ms: list[float] = field(default_factory=list)
    batch_lines: int = 0
    lasted_s: float = 0.0

    def add(self, other: Seen) -> None:
        self.ttft_ms += other.ttft_ms
        self.tpot_ms += other.tpot_ms
        self.batch_lines += other.batch_lines
        self.lasted_s += other.lasted_s


class BatchMesh(BenchMesh):
    """A mesh whose device has room for both models."""

    def __init__(self, home: Path, models: dict[str, Path]) -> None:
        self.environment = {**os.environ, "THAW_HOME": str(home), "THAW_SUSPEND": "off"}
        entries = [{"name": name, "source": str(path), "isolation": "shared"} for name, path in models.items()]
        config = home.parent / f"{home.name}.yaml"
        mesh = {"port": free_port(), "nodes": {"node-0": {"cpu:0": "3GiB"}}}
        config.write_text(yaml.safe_dump({"mesh": mesh, "defaults": {"keep_alive": -1}, "models": entries}))
        self.url = str(self.thaw("up", "--detach", "--config", str(config))["endpoint"])
        self.http = httpx.Client(base_url=self.url, timeout=300)


async def _stream(client: httpx.AsyncClient, prompt: str, seen: Seen) -> None:
    body = {"model": "one", "prompt": prompt, "max_tokens": _TOKENS, "temperature": 0, "ignore_eos": True, "stream": True}
    began = time.perf_counter()
    times: list[float] = []
    async with client.stream("POST", "/completions", json=body) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if '"error":' in line:
                raise RuntimeError(line)
            if '"text"' in line and '"finish_reason":null' in line.replace(" ", ""):
                times.append(time.perf_counter())
    seen.ttft_ms.append((times[0] - began) * 1e3)
    seen.tpot_ms.append((times[-1] - times[0]) / max(1, len(times) - 1) * 1e3)


async def _start_batch(client: httpx.AsyncClient, model: str, seed: int, prompt: int) -> str:
    body = {"model": model, "max_tokens": _BATCH_TOKENS, "temperature": 0, "ignore_eos": True}
    lines = [
        {
            "custom_id": str(i),
            "method": "POST",
            "url": "/v1/completions",
            "body": body | {"prompt": f"Question {seed} {i}" + f" {i % 10}" * (prompt // 2)},
        }
        for i in range(_LINES)
    ]
    content = "\n".join(map(json.dumps, lines)).encode()
    file = await client.post("/files", files={"file": ("in.jsonl", content)}, data={"purpose": "batch"})
    file.raise_for_status()
    asked = {"input_file_id": file.json()["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
    batch = await client.post("/batches", json=asked)
    batch.raise_for_status()
    return str(batch.json()["id"])


async def _end_batch(client: httpx.AsyncClient, batch: str) -> int:
    """Cancel a batch, and return the number of its responses."""
    (await client.post(f"/batches/{batch}/cancel")).raise_for_status()
    while True:
        found = (await client.get(f"/batches/{batch}")).json()
        if found["status"] in ("cancelled", "completed"):
            return int(found["request_counts"]["completed"])
        if found["status"] == "failed":
            raise RuntimeError(found)
        await asyncio.sleep(0.1)


async def measure(url: str, case: str, seconds: float, rate: float, seed: int, prompt: int) -> Seen:
    """Measure one case, with the same times and prompts in all cases of a round."""
    seen, draw = Seen(), random.Random(seed)
    async with httpx.AsyncClient(base_url=url, timeout=300) as client:
        batch = None if case == "alone" else await _start_batch(client, "one" if case == "same" else "two", seed, prompt)
        batch_began = time.perf_counter()
        await asyncio.sleep(_WARM_S)
        began = at = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            number = 0
            while (at := at + draw.expovariate(rate)) < began + seconds:
                await asyncio.sleep(max(0.0, at - time.perf_counter()))
                group.create_task(_stream(client, f"Once {seed} {number} {case}", seen))
                number += 1
        ended = time.perf_counter()
        seen.lasted_s = ended - began
        if batch is not None:
            lines = await _end_batch(client, batch)
            seen.batch_lines = round(lines * seen.lasted_s / (ended - batch_began))
    return seen


def measure_all(url: str, cases: Sequence[str], rounds: int, seconds: float, rate: float, prompt: int) -> dict[str, float]:
    """Return the figures of all rounds together."""
    found = {case: Seen() for case in cases}
    for number in range(rounds + 1):
        for case in cases[:: 1 if number % 2 else -1]:
            seen = asyncio.run(measure(url, case, seconds if number else 2.0, rate, number, prompt))
            if number:  # the first round warms up
                found[case].add(seen)
    figures: dict[str, float] = {}
    for case, seen in found.items():
        tokens = len(seen.ttft_ms) * _TOKENS + seen.batch_lines * _BATCH_TOKENS
        figures |= {
            f"{case}.requests": len(seen.ttft_ms),
            f"{case}.ttft_p50_ms": percentile(seen.ttft_ms, 50),
            f"{case}.ttft_p99_ms": percentile(seen.ttft_ms, 99),
            f"{case}.tpot_p50_ms": percentile(seen.tpot_ms, 50),
            f"{case}.tpot_p99_ms": percentile(seen.tpot_ms, 99),
            f"{case}.batch_lines": seen.batch_lines,
            f"{case}.tokens_per_s": tokens / seen.lasted_s,
        }
    for case in cases[1:]:
        for what in ("ttft_p50_ms", "ttft_p99_ms", "tpot_p50_ms", "tpot_p99_ms"):
            figures[f"{case}.{what}_ratio"] = figures[f"{case}.{what}"] / figures[f"alone.{what}"]
    return figures


def main(arguments: Sequence[str] | None = None) -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=15.0, help="of each case")
    parser.add_argument("--rate", type=float, default=2.0, help="interactive requests per second")
    parser.add_argument("--prompt", type=int, default=4, help="tokens of a batch's prompts")
    parser.add_argument("--cases", default=",".join(_CASES), help="alone is first")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    print(json.dumps(machine()), file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix="thaw-batch-") as directory:
        root = Path(directory)
        models = {name: make_demo_model(root / name, _SIZE, n) for n, name in enumerate(("one", "two"))}
        with contextlib.closing(BatchMesh(root / "home", models)) as mesh:
            figures = measure_all(mesh.url, options.cases.split(","), options.rounds, options.seconds, options.rate, options.prompt)
    for name, value in figures.items():
        print(f"{name:28} {value:10.2f}")
    write(options.json, figures)


if __name__ == "__main__":
    main()
