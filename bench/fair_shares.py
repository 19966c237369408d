"""Measure the cost of a key's flood to another key.

    python -m bench.fair_shares [--rounds N] [--json PATH]

One gateway process and the engine of prepared tokens with a few slots, so that its capacity is
known. Two keys of equal weight; each one's share is half of the capacity. Key B sends a part of its
share, at random times; key A sends 20 times its own. Each round measures B alone, both, and A
alone, in this order or reversed. The flood is a process of its own. Requests that are refused
(429) are counted and not repeated.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import httpx

from bench.key_limits import add_key, await_key
from bench.prepared_engine import FREE, PACED
from bench.report import write
from bench.warm_targets import Processes, start_nats
from shared.percentiles import percentile
from shared.ports import free_port

SLOTS, TOKENS, PACE_MS = 4, 20, 10.0
CAPACITY = SLOTS / (TOKENS * PACE_MS / 1e3)
"""Requests per second of the engine."""
FLOOD = 20
KEY_A, KEY_B = "sk-a", "sk-b"
_SETTLE_S = 2.0
_FILL_S = 3.0
"""Time in which the flood fills the queue before B is measured beside it."""


@dataclass
class Seen:
    """Measurements of one key's requests in one phase; times in milliseconds."""

    ttft_ms: list[float] = field(default_factory=list)
    total_ms: list[float] = field(default_factory=list)
    refused: int = 0
    lasted_s: float = 0.0

    def add(self, other: Seen) -> None:
        self.ttft_ms += other.ttft_ms
        self.total_ms += other.total_ms
        self.refused += other.refused
        self.lasted_s += other.lasted_s


async def _send(client: httpx.AsyncClient, seen: Seen) -> None:
    body = {"model": PACED, "messages": [{"role": "user", "content": "?"}], "max_tokens": TOKENS, "stream": True}
    began = time.perf_counter()
    async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
        if answer.status_code == 429:
            seen.refused += 1
            return
        answer.raise_for_status()
        first: float | None = None
        async for line in answer.aiter_lines():
            if '"queue_full"' in line:
                seen.refused += 1
                return
            if first is None and '"content":' in line and '"content":""' not in line:
                first = time.perf_counter()
    if first is None:
        raise RuntimeError("a response without text")
    seen.ttft_ms.append((first - began) * 1e3)
    seen.total_ms.append((time.perf_counter() - began) * 1e3)


async def send_for(port: int, key: str, rate: float, seconds: float, seed: int) -> Seen:
    """Send requests at random times (Poisson) without waiting for earlier ones.

    Responses that are not complete at the end are abandoned: they do not count.
    """
    seen, draw = Seen(), random.Random(seed)
    limits = httpx.Limits(max_connections=2000)
    headers = {"authorization": f"Bearer {key}"}
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", headers=headers, timeout=120, limits=limits) as client:
        began = at = time.perf_counter()
        tasks = set()
        while (at := at + draw.expovariate(rate)) < began + seconds and time.perf_counter() < began + seconds:
            await asyncio.sleep(max(0.0, at - time.perf_counter()))
            task = asyncio.create_task(_send(client, seen))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        seen.lasted_s = time.perf_counter() - began
        for task in list(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return seen


@contextlib.contextmanager
def _flooding(port: int, seconds: float, seed: int) -> Iterator[list[Seen]]:
    command = [sys.executable, "-m", "bench.fair_shares", "--flood", str(port), "--seconds", str(seconds), "--seed", str(seed)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    found: list[Seen] = []
    try:
        yield found
        out, _ = process.communicate(timeout=seconds + 60)
        found.append(Seen(**json.loads(out)))
    finally:
        process.kill()
        process.wait()


def measure(port: int, rounds: int, seconds: float, own: float) -> dict[str, float]:
    """Return the figures of all rounds."""
    share = CAPACITY / 2
    alone, beside, flood, flood_alone = Seen(), Seen(), Seen(), Seen()
    for number in range(rounds):
        for phase in ("alone", "both", "flood")[:: 1 if number % 2 == 0 else -1]:
            if phase == "alone":
                alone.add(asyncio.run(send_for(port, KEY_B, own * share, seconds, number)))
            else:
                with _flooding(port, seconds + _FILL_S, number) as found:
                    time.sleep(_FILL_S)
                    if phase == "both":
                        beside.add(asyncio.run(send_for(port, KEY_B, own * share, seconds, number)))
                    else:
                        time.sleep(seconds)
                (flood if phase == "both" else flood_alone).add(found[0])
            time.sleep(_SETTLE_S)
    both_rate = (len(flood.total_ms) + len(beside.total_ms)) / flood.lasted_s
    alone_rate = len(flood_alone.total_ms) / flood_alone.lasted_s
    return {
        "capacity_per_s": CAPACITY,
        "b.rate_per_s": own * share,
        **_figures("b.alone", alone),
        **_figures("b.flooded", beside),
        "b.ttft_p99_ratio": percentile(beside.ttft_ms, 99) / percentile(alone.ttft_ms, 99),
        "b.total_p99_ratio": percentile(beside.total_ms, 99) / percentile(alone.total_ms, 99),
        "a.refused": flood.refused,
        "both.completed_per_s": both_rate,
        "a_alone.completed_per_s": alone_rate,
        "throughput_ratio": both_rate / alone_rate,
    }


def _figures(name: str, seen: Seen) -> dict[str, float]:
    return {
        f"{name}.completed": len(seen.total_ms),
        f"{name}.refused": seen.refused,
        f"{name}.ttft_p50_ms": percentile(seen.ttft_ms, 50),
        f"{name}.ttft_p99_ms": percentile(seen.ttft_ms, 99),
        f"{name}.total_p99_ms": percentile(seen.total_ms, 99),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=15.0, help="of each phase")
    parser.add_argument("--own", type=float, default=0.5, help="part of its share that key B sends")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--flood", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.flood is not None:
        seen = asyncio.run(send_for(options.flood, KEY_A, FLOOD * CAPACITY / 2, options.seconds, options.seed))
        print(json.dumps(asdict(seen)))
        return
    with tempfile.TemporaryDirectory(prefix="thaw-bench-") as directory, contextlib.ExitStack() as stack:
        processes = Processes(Path(directory), stack)
        nats_url, _ = start_nats(processes, Path(directory))
        engine = ["bench.batched_engine", "--nats", nats_url]
        processes.start("engine", [sys.executable, "-m", *engine, "--slots", str(SLOTS), "--pace", str(PACE_MS)])
        port = free_port()
        settings = {
            "THAW_NATS_URL": nats_url,
            "THAW_GATEWAY_PORT": str(port),
            "THAW_HOME": directory,
            "THAW_ADMIN_KEY": "bench-admin",
        }
        processes.start("gateway", [sys.executable, "-m", "services.gateway"], settings)
        processes.await_answer("gateway", port, FREE)
        for name, key in (("a", KEY_A), ("b", KEY_B)):
            add_key(port, name, key, {})
            await_key(port, key)
        figures = measure(port, options.rounds, options.seconds, options.own)
    for name, value in figures.items():
        print(f"{name}: {value:.2f}")
    write(options.json, figures)


if __name__ == "__main__":
    main()
