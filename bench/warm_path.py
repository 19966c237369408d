"""Time that the mesh adds to a warm engine: time to first token, time between tokens, and how many
tokens a second one gateway carries.

    python -m bench.warm_path [--rounds N] [--streams 1,16,64] [--tokens N] [--pace MS]
        [--seconds S]
                              [--litellm PYTHON | --no-litellm] [--json PATH]

Three targets for the same client (bench/load_client.py) and the same engine of prepared tokens
(bench/prepared_engine.py), interleaved: the engine itself over HTTP; one Thaw gateway process,
which reaches it over NATS; one LiteLLM proxy process, which reaches it over HTTP. Latencies are of
paced streams, which leave the processors idle in between; tokens a second are of streams as fast as
they go. The CPU time of every process is printed per token, since all of them share one machine.
LiteLLM lives in a virtual environment of its own; without --litellm one is made in the user's
cache.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from bench.prepared_engine import FREE, PACED
from bench.report import machine, median, write
from bench.warm_targets import DIRECT, LITELLM, THAW, Target, litellm_python, litellm_version, running

Samples = dict[str, list[float]]
"""A value for each round, by `target.streams.way.figure`."""
_ALONE_REQUESTS = 16
"""Requests of one stream alone in a round: as many first tokens as sixteen streams give."""
_ADDED = ("ttft_p50_ms", "ttft_p99_ms", "gap_p50_ms", "gap_p99_ms", "gap_mean_ms")


def cpu_s(process: psutil.Process) -> float:
    """CPU seconds of a process and its children."""
    return sum(sum(p.cpu_times()[:2]) for p in (process, *process.children(recursive=True)))


def run_client(target: Target, **options: Any) -> dict[str, float]:
    """The client's measurements, and the CPU time of each process for a token."""
    arguments = [f"--{name}={value}" for name, value in ({"port": target.port} | options).items()]
    before = {name: cpu_s(p) for name, p in target.processes.items()}
    done = subprocess.run([sys.executable, "-m", "bench.load_client", *arguments], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"the client failed against {target.name}: {done.stderr[-2000:]}")
    measured: dict[str, float] = json.loads(done.stdout)
    used = {name: cpu_s(p) - before[name] for name, p in target.processes.items()} | {"client": measured.pop("cpu_s")}
    tokens = measured.pop("received")
    return measured | {f"{name}_cpu_us_per_token": 1e6 * seconds / tokens for name, seconds in used.items()}


def take_latencies(target: Target, streams: int, options: argparse.Namespace) -> dict[str, float]:
    """Measure the latencies of paced streams.

    Their starts are spread over the length of one stream: every first token meets the others'
    tokens, not their beginnings.
    """
    stagger = options.tokens * options.pace / 1e3 / streams
    requests = max(1, _ALONE_REQUESTS // streams)
    return run_client(target, model=PACED, streams=streams, tokens=options.tokens, requests=requests, stagger=stagger)


def take_throughput(target: Target, streams: int, options: argparse.Namespace) -> dict[str, float]:
    """Measure the throughput of unpaced streams.

    All run at once, and each asks again when it has its response.
    """
    return run_client(target, model=FREE, streams=streams, tokens=options.tokens, seconds=options.seconds)


def measure(options: argparse.Namespace) -> Samples:
    samples: Samples = defaultdict(list)
    samples["load_average_before"].append(os.getloadavg()[0])
    with running(options.pace, options.litellm) as targets:
        for number in range(options.rounds):
            for streams in options.streams:
                load = os.getloadavg()[0]
                print(f"round {number + 1}/{options.rounds}: {streams} streams; load average {load:.1f}", file=sys.stderr)
                for way, take in (("paced", take_latencies), ("free", take_throughput)):
                    for target in targets:
                        for figure, value in take(target, streams, options).items():
                            samples[f"{target.name}.{streams}.{way}.{figure}"].append(value)
    return samples


def figures_of(samples: Samples, streams: Sequence[int]) -> dict[str, float]:
    """Return medians over the rounds.

    They include what each proxy adds to the engine alone, and Thaw against LiteLLM.
    """
    figures = {name: median(values) for name, values in samples.items()}
    for number in streams:
        for figure in _ADDED:
            for target in (THAW, LITELLM):
                if (value := figures.get(f"{target}.{number}.paced.{figure}")) is not None:
                    figures[f"{target}.{number}.added.{figure}"] = value - figures[f"{DIRECT}.{number}.paced.{figure}"]
        for figure in ("added.ttft_p50_ms", "free.tokens_per_s", "paced.proxy_cpu_us_per_token"):
            if (peer := figures.get(f"{LITELLM}.{number}.{figure}")) is not None:
                figures[f"thaw_over_litellm.{number}.{figure}"] = figures[f"{THAW}.{number}.{figure}"] / peer
    return figures


def show(figures: dict[str, float], streams: Sequence[int]) -> None:
    paced = ("paced.ttft_p50_ms", "added.ttft_p50_ms", "paced.ttft_p99_ms", "paced.gap_p50_ms", "paced.gap_p99_ms")
    columns = (*paced, "added.gap_p99_ms", "added.gap_mean_ms", "free.tokens_per_s")
    heads = (c.removeprefix("paced.").removeprefix("free.").replace(".", " ").replace("_", " ") for c in columns)
    table = Table("target", "streams", *heads, "CPU µs/token, paced", "CPU µs/token, free", title="Warm path (medians of rounds)")
    for number in streams:
        for target in (DIRECT, THAW, LITELLM):
            if f"{target}.{number}.free.tokens_per_s" in figures:
                row = [figures.get(f"{target}.{number}.{c}") for c in columns]
                cells = ["" if v is None else f"{v:,.0f}" if v >= 1000 else f"{v:.2f}" for v in row]
                table.add_row(
                    target, str(number), *cells, *(_cpu(figures, f"{target}.{number}.{way}") for way in ("paced", "free"))
                )
    Console(width=200).print(table)
    for name, value in figures.items():
        if name.startswith("thaw_over_litellm"):
            print(f"{name}: {value:.3f}")


def _cpu(figures: dict[str, float], prefix: str) -> str:
    used = {part: figures.get(f"{prefix}.{part}_cpu_us_per_token") for part in ("client", "engine", "nats", "proxy")}
    return ", ".join(f"{part} {value:.0f}" for part, value in used.items() if value is not None)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--streams", type=lambda text: [int(n) for n in text.split(",")], default=[1, 16, 64])
    parser.add_argument("--tokens", type=int, default=128, help="of each answer")
    parser.add_argument("--pace", type=float, default=10.0, help="milliseconds between the tokens of a paced stream")
    parser.add_argument("--seconds", type=float, default=3.0, help="of each measurement of tokens a second")
    peer = parser.add_mutually_exclusive_group()
    peer.add_argument(
        "--litellm", type=Path, default=None, metavar="PYTHON", help="interpreter of an environment with litellm[proxy]"
    )
    peer.add_argument("--no-litellm", action="store_true", help="leave the peer out")
    parser.add_argument("--json", type=Path, default=None)
    return parser.parse_args(arguments)


def main() -> None:
    options = parse(sys.argv[1:])
    if options.no_litellm:
        print("LiteLLM is left out: there is nothing to compare with", file=sys.stderr)
    elif options.litellm is None:
        options.litellm = litellm_python()
    if options.litellm is not None:
        print(f"peer: LiteLLM {litellm_version(options.litellm)}", file=sys.stderr)
    print(json.dumps(machine()), file=sys.stderr)
    samples = measure(options)
    figures = figures_of(samples, options.streams)
    show(figures, options.streams)
    write(options.json, figures)


if __name__ == "__main__":
    main()
