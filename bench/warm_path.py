"""What the mesh adds to a warm engine: time to first token, time between tokens, and how many tokens a second one gateway carries.

    python -m bench.warm_path [--rounds N] [--streams 1,16,64] [--tokens N] [--pace MS] [--seconds S]
                              [--litellm PYTHON | --no-litellm] [--json PATH]

Three targets for the same client (bench/load_client.py) and the same engine of prepared tokens (bench/prepared_engine.py), interleaved:
the engine itself over HTTP; one Thaw gateway process, which reaches it over NATS; one LiteLLM proxy process, which reaches it over HTTP.
Latencies are of paced streams, which leave the processors idle in between; tokens a second are of streams as fast as they go. The CPU
time of every process is told by token, since all of them share one machine. LiteLLM lives in a virtual environment of its own; without
--litellm one is made in the user's cache.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import yaml
from rich.console import Console
from rich.table import Table

from bench.prepared_engine import FREE, PACED
from bench.report import machine, median, write
from thaw.launcher.servers import MAX_PAYLOAD, nats_program

DIRECT, THAW, LITELLM = "direct", "thaw", "litellm"
LITELLM_REQUIREMENT = "litellm[proxy]>=1.100"
Samples = dict[str, list[float]]
"""A value for each round, by `target.streams.way.figure`."""
_ALONE_REQUESTS = 16
"""Requests of one stream alone in a round: as many first tokens as sixteen streams give."""
_READY_WITHIN_S = 120.0
_ADDED = ("ttft_p50_ms", "ttft_p99_ms", "gap_p50_ms", "gap_p99_ms", "gap_mean_ms")


@dataclass
class Target:
    """Something that answers chat completions. `processes`: what works for it, by name."""

    name: str
    port: int
    processes: dict[str, psutil.Process]


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


class Processes:
    """The processes of a run, their output in files, ended with it."""

    def __init__(self, directory: Path, stack: contextlib.ExitStack) -> None:
        self._directory = directory
        self._stack = stack

    def start(self, name: str, command: Sequence[str], environment: dict[str, str] | None = None) -> psutil.Process:
        log = self._stack.enter_context((self._directory / f"{name}.log").open("wb"))
        process = subprocess.Popen(command, env={**os.environ, **(environment or {})}, stdout=log, stderr=log)
        self._stack.callback(_end, process)
        return psutil.Process(process.pid)

    def await_answer(self, name: str, port: int, model: str) -> None:
        """Until the process streams an answer."""
        body = {"model": model, "messages": [{"role": "user", "content": "?"}], "max_tokens": 1, "stream": True}
        deadline = time.monotonic() + _READY_WITHIN_S
        while time.monotonic() < deadline:
            with contextlib.suppress(httpx.TransportError):
                answer = httpx.post(f"http://127.0.0.1:{port}/v1/chat/completions", json=body, timeout=10)
                if answer.is_success and b"[DONE]" in answer.content:
                    return
            time.sleep(0.1)
        raise RuntimeError(f"{name} does not answer:\n{(self._directory / f'{name}.log').read_text()[-2000:]}")


def _end(process: subprocess.Popen[bytes]) -> None:
    # The wheel's nats-server is a launcher of the real one.
    children = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for child in children:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.terminate()


@contextlib.contextmanager
def running(options: argparse.Namespace) -> Iterator[list[Target]]:
    """All servers, each answering."""
    with tempfile.TemporaryDirectory(prefix="thaw-bench-") as directory, contextlib.ExitStack() as stack:
        home = Path(directory)
        processes = Processes(home, stack)
        nats_port, engine_port, gateway_port = free_port(), free_port(), free_port()
        nats_url = f"nats://127.0.0.1:{nats_port}"
        config = home / "nats.conf"
        config.write_text(
            f'listen: "127.0.0.1:{nats_port}"\nmax_payload: {MAX_PAYLOAD}\njetstream {{ store_dir: "{home}/jetstream" }}\n'
        )
        nats = processes.start("nats", [nats_program(), "-c", str(config)])
        _await_port(nats_port)
        engine_command = ["bench.prepared_engine", "--nats", nats_url, "--port", str(engine_port), "--pace", str(options.pace)]
        engine = processes.start("engine", [sys.executable, "-m", *engine_command])
        gateway_settings = {"THAW_NATS_URL": nats_url, "THAW_GATEWAY_PORT": str(gateway_port), "THAW_HOME": str(home)}
        gateway = processes.start("gateway", [sys.executable, "-m", "services.gateway"], gateway_settings)
        targets = [
            Target(DIRECT, engine_port, {"engine": engine}),
            Target(THAW, gateway_port, {"engine": engine, "nats": nats, "proxy": gateway}),
        ]
        if options.litellm:
            proxy, port = _start_litellm(processes, options.litellm, home, engine_port)
            targets.append(Target(LITELLM, port, {"engine": engine, "proxy": proxy}))
        for target in targets:
            processes.await_answer(
                "engine" if target.name == DIRECT else "gateway" if target.name == THAW else LITELLM, target.port, FREE
            )
        yield targets


def _await_port(port: int) -> None:
    deadline = time.monotonic() + _READY_WITHIN_S
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(0.02)
    raise RuntimeError(f"nothing listens on port {port}")


def _start_litellm(processes: Processes, python: Path, home: Path, engine_port: int) -> tuple[psutil.Process, int]:
    """The proxy as its documentation has it for production: one worker, no callbacks, no debug output."""
    port = free_port()
    base = f"http://127.0.0.1:{engine_port}/v1"
    models = [
        {"model_name": m, "litellm_params": {"model": f"openai/{m}", "api_base": base, "api_key": "none"}} for m in (FREE, PACED)
    ]
    config = home / "litellm.yaml"
    config.write_text(yaml.safe_dump({"model_list": models, "litellm_settings": {"set_verbose": False, "request_timeout": 600}}))
    environment = {
        "LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "LITELLM_LOG": "ERROR",
        "LITELLM_MODE": "PRODUCTION",
    }
    arguments = ["--config", str(config), "--host", "127.0.0.1", "--port", str(port), "--num_workers", "1", "--telemetry", "False"]
    return processes.start(LITELLM, [str(python.parent / "litellm"), *arguments], environment), port


def litellm_python() -> Path:
    """The interpreter of a virtual environment with LiteLLM's proxy, made unless it is there."""
    place = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "thaw-bench" / "litellm"
    python = place / "bin" / "python"
    if not (place / "bin" / "litellm").exists():
        print(f"installing {LITELLM_REQUIREMENT} into {place}", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", str(place)], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", LITELLM_REQUIREMENT], check=True)
    return python


def cpu_s(process: psutil.Process) -> float:
    """CPU seconds of a process and its children."""
    return sum(sum(p.cpu_times()[:2]) for p in (process, *process.children(recursive=True)))


def run_client(target: Target, **options: Any) -> dict[str, float]:
    """What the client measured, and the CPU time of each process for a token."""
    arguments = [f"--{name}={value}" for name, value in ({"port": target.port} | options).items()]
    before = {name: cpu_s(p) for name, p in target.processes.items()}
    done = subprocess.run([sys.executable, "-m", "bench.load_client", *arguments], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"the client failed against {target.name}: {done.stderr[-2000:]}")
    measured: dict[str, float] = json.loads(done.stdout)
    used = {name: cpu_s(p) - before[name] for name, p in target.processes.items()} | {"client": measured.pop("cpu_s")}
    tokens = measured.pop("tokens")
    return measured | {f"{name}_cpu_us_per_token": 1e6 * seconds / tokens for name, seconds in used.items()}


def take_latencies(target: Target, streams: int, options: argparse.Namespace) -> dict[str, float]:
    """Paced streams that begin spread over the length of one: every first token meets the others' tokens, not their beginnings."""
    stagger = options.tokens * options.pace / 1e3 / streams
    requests = max(1, _ALONE_REQUESTS // streams)
    return run_client(target, model=PACED, streams=streams, tokens=options.tokens, requests=requests, stagger=stagger)


def take_throughput(target: Target, streams: int, options: argparse.Namespace) -> dict[str, float]:
    """Streams as fast as they go, all at once, each asking again when it has its answer."""
    return run_client(target, model=FREE, streams=streams, tokens=options.tokens, seconds=options.seconds)


def measure(options: argparse.Namespace) -> Samples:
    samples: Samples = defaultdict(list)
    with running(options) as targets:
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
    """Medians over the rounds; what each proxy adds to the engine alone; Thaw against LiteLLM."""
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
    heads = (c.replace(".", " ").replace("_", " ") for c in columns)
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
    print(json.dumps(machine()), file=sys.stderr)
    samples = measure(options)
    figures = figures_of(samples, options.streams)
    show(figures, options.streams)
    write(options.json, figures)


if __name__ == "__main__":
    main()
