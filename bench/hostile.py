"""Cost of hostile clients to a gateway: the worst stall of its event loop, its memory for each byte
sent, and another client's latency.

    python -m bench.hostile [--short] [--seconds S] [--json PATH]

One gateway process in front of an engine of prepared tokens (bench/prepared_engine.py). A probe in
the gateway's loop wakes every 5 ms and notes how late it was, and how much CPU time the loop's
thread used meanwhile: the latter is the stall on a machine that others use too. Memory is the
growth of the process's peak (VmHWM, reset before each case) for each byte of the body. `--short`:
fewer connections, seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import uvloop
from rich.console import Console
from rich.table import Table

from bench.prepared_engine import FREE
from bench.report import write
from bench.warm_targets import Processes, start_nats
from shared.percentiles import percentile
from shared.ports import free_port

SEED = 1
_INTERVAL_S = 0.005
_CHAT, _COMPLETION, _FORM_ROUTE = "/v1/chat/completions", "/v1/completions", "/v1/audio/transcriptions"
_JSON, _FORM = "application/json", "multipart/form-data; boundary=b"
GOALS = {"stall_ms": 50.0, "memory_per_byte": 20.0, "latency_ratio": 2.0}


@dataclass(frozen=True)
class Case:
    """A body, and where it goes."""

    name: str
    path: str
    kind: str
    body: bytes


def corpus(size: int) -> list[Case]:
    """Return bodies of about `size` bytes that are expensive for a careless server.

    Each costs such a server more than it costs its sender.
    """
    start = b'{"model":"%b","max_tokens":1,"messages":[{"role":"user","content":"x"}]' % FREE.encode()
    prompt = b'{"model":"%b","max_tokens":1,"prompt":[' % FREE.encode()
    chance = random.Random(SEED)

    def repeat_unit(unit: bytes) -> bytes:
        return unit * (size // len(unit))

    return [
        Case("form: repeated header", _FORM_ROUTE, _FORM, b"--b\r\n" + repeat_unit(b"content-disposition:") + b"\r\n--b--\r\n"),
        Case("form: false boundaries", _FORM_ROUTE, _FORM, b"--b\r\nx: y\r\n\r\n" + repeat_unit(b"\r\n--bx") + b"\r\n--b--\r\n"),
        Case("form: parts", _FORM_ROUTE, _FORM, repeat_unit(b"--b\r\nx: y\r\n\r\nz\r\n") + b"--b--\r\n"),
        Case("form: random bytes", _FORM_ROUTE, _FORM, b"--b\r\nx: y\r\n\r\n" + chance.randbytes(size) + b"\r\n--b--\r\n"),
        Case("json: null messages", _CHAT, _JSON, b'{"model":"free","messages":[' + repeat_unit(b"null,") + b"null]}"),
        Case("json: null messages under the limit", _CHAT, _JSON, b'{"model":"free","messages":[' + b"null," * 100_000 + b"null]}"),
        Case("json: 100,000 prompts x 128", _COMPLETION, _JSON, prompt + b'"a",' * 100_000 + b'"a"],"n":128}'),
        Case("json: token ids", _COMPLETION, _JSON, prompt + b"1," * 150_000 + b"1]}"),
        Case("json: lists of lists", _COMPLETION, _JSON, prompt + repeat_unit(b"[1],") + b"[1]]}"),
        Case("json: members", _CHAT, _JSON, start + b"".join(b',"%d":1' % i for i in range(17_000)) + b"}"),
        Case("json: biases", _CHAT, _JSON, start + b',"logit_bias":{' + repeat_unit(b'"1":null,') + b'"2":null}}'),
        Case("json: depth", _CHAT, _JSON, repeat_unit(b"[")),
        Case("json: brackets in text", _CHAT, _JSON, start + b',"user":"' + repeat_unit(b'[{,\\"') + b'"}'),
        Case("json: escapes", _CHAT, _JSON, start + b',"user":"' + repeat_unit(b"\\u00e9") + b'"}'),
        Case("json: long text", _CHAT, _JSON, start + b',"user":"' + repeat_unit(b"a") + b'"}'),
        Case("json: digits", _CHAT, _JSON, start + b',"seed":' + repeat_unit(b"9") + b"}"),
        Case("json: open string", _CHAT, _JSON, start + b',"user":"' + repeat_unit(b"\\\\")),
        Case("json: not UTF-8", _CHAT, _JSON, repeat_unit(b"\xff")),
    ]


# The gateway, with a probe in its loop.


async def probe(path: Path) -> None:
    """Write (monotonic time, ms late, ms of CPU) of each late or busy waking.

    The probe runs until it is cancelled.
    """
    with path.open("a", buffering=1) as out:
        while True:
            wall, cpu = time.monotonic(), time.thread_time()
            await asyncio.sleep(_INTERVAL_S)
            late = (time.monotonic() - wall - _INTERVAL_S) * 1e3
            used = (time.thread_time() - cpu) * 1e3
            if max(late, used) > 1:
                out.write(f"{time.monotonic()} {late:.3f} {used:.3f}\n")


def serve(path: Path) -> int:
    """Run a gateway as `python -m services.gateway` does, with the probe beside it."""
    from services.gateway.app import app
    from services.gateway.settings import GatewaySettings
    from shared.runtime import run_service

    async def run_probed(settings: GatewaySettings, stop: asyncio.Event) -> int:
        task = asyncio.create_task(probe(path), name="probe")
        try:
            return await app(settings, stop)
        finally:
            task.cancel()

    return run_service("gateway", GatewaySettings, run_probed, loop_factory=uvloop.new_event_loop)


class Gateway:
    def __init__(self, process: psutil.Process, port: int, stalls: Path) -> None:
        self.process = process
        self.port = port
        self._stalls = stalls

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def reset_peak(self) -> int:
        """Reset the peak; returns the present size in bytes."""
        Path(f"/proc/{self.process.pid}/clear_refs").write_text("5")
        return self.peak()

    def peak(self) -> int:
        for line in Path(f"/proc/{self.process.pid}/status").read_text().splitlines():
            if line.startswith("VmHWM"):
                return int(line.split()[1]) * 1024
        raise RuntimeError("the kernel does not report VmHWM")

    def stalls(self, since: float) -> tuple[float, float]:
        """Return the latest waking and the most CPU time between two, in ms.

        Both are since a monotonic time.
        """
        rows = [[float(n) for n in line.split()] for line in self._stalls.read_text().splitlines() if line.count(" ") == 2]
        found = [r for r in rows if r[0] >= since]
        return max((r[1] for r in found), default=0.0), max((r[2] for r in found), default=0.0)


@contextlib.contextmanager
def running() -> Iterator[Gateway]:
    with tempfile.TemporaryDirectory(prefix="thaw-bench-") as directory, contextlib.ExitStack() as stack:
        home = Path(directory)
        processes = Processes(home, stack)
        (nats_url, _), engine_port, port = start_nats(processes, home), free_port(), free_port()
        processes.start("engine", [sys.executable, "-m", "bench.prepared_engine", "--nats", nats_url, "--port", str(engine_port)])
        settings = {"THAW_NATS_URL": nats_url, "THAW_GATEWAY_PORT": str(port), "THAW_HOME": str(home), "THAW_LOG_LEVEL": "error"}
        stalls = home / "stalls"
        stalls.touch()
        gateway = processes.start("gateway", [sys.executable, "-m", "bench.hostile", "--serve", str(stalls)], settings)
        processes.await_answer("gateway", port, FREE)
        yield Gateway(gateway, port, stalls)


# What is measured.


def run_corpus(gateway: Gateway, size: int, figures: dict[str, float]) -> None:
    with httpx.Client(base_url=gateway.url, timeout=120) as http:
        for case in corpus(size):
            before, since = gateway.reset_peak(), time.monotonic()
            status = http.post(case.path, content=case.body, headers={"content-type": case.kind}).status_code
            time.sleep(0.1)
            late, used = gateway.stalls(since)
            name = case.name
            figures[f"{name}.status"] = status
            figures[f"{name}.bytes"] = len(case.body)
            figures[f"{name}.stall_cpu_ms"] = used
            figures[f"{name}.stall_wall_ms"] = late
            figures[f"{name}.memory_per_byte"] = max(0, gateway.peak() - before) / len(case.body)


async def crowd(gateway: Gateway, idle: int, slow: int, figures: dict[str, float]) -> None:
    """Open idle connections from several addresses, slow writers, and silent readers.

    Slow writers write a byte at a time; silent readers do not read.
    """
    before, since = gateway.reset_peak(), time.monotonic()
    writers: list[asyncio.StreamWriter] = []
    refused = 0
    for number in range(idle):
        source = (f"127.0.0.{2 + number % 5}", 0)
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", gateway.port, local_addr=source)
            writers.append(writer)
        except OSError:
            refused += 1
    body = json.dumps({"model": FREE, "max_tokens": 20_000, "stream": True, "messages": [{"role": "user", "content": "x"}]})
    head = f"POST {_CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-type: {_JSON}\r\ncontent-length: {len(body)}\r\n\r\n"
    for _ in range(slow):
        _, reads_nothing = await asyncio.open_connection("127.0.0.1", gateway.port, limit=1024)
        reads_nothing.write((head + body).encode())
        _, writes_slowly = await asyncio.open_connection("127.0.0.1", gateway.port)
        writes_slowly.write(head.encode())
        writers += [reads_nothing, writes_slowly]
    async with httpx.AsyncClient(base_url=gateway.url, timeout=60) as http:
        taken = []
        for index in range(50):
            for writer in writers[-2 * slow + 1 :: 2]:
                writer.write(body[index : index + 1].encode())
            began = time.perf_counter()
            (await http.get("/health")).raise_for_status()
            taken.append((time.perf_counter() - began) * 1e3)
            await asyncio.sleep(0.02)
    late, used = gateway.stalls(since)
    figures["crowd.idle_connections"] = idle - refused
    figures["crowd.connect_failed"] = refused
    figures["crowd.memory_per_connection_kb"] = (gateway.peak() - before) / len(writers) / 1024
    figures["crowd.health_p99_ms"] = percentile(taken, 99)
    figures["crowd.stall_cpu_ms"] = used
    figures["crowd.stall_wall_ms"] = late
    for writer in writers:
        writer.transport.abort()


def latencies(url: str, seconds: float) -> list[float]:
    """A client's short requests, one after the other, in ms."""
    taken: list[float] = []
    body = {"model": FREE, "max_tokens": 4, "messages": [{"role": "user", "content": "x"}]}
    with httpx.Client(base_url=url, timeout=60) as http:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            began = time.perf_counter()
            http.post(_CHAT, json=body).raise_for_status()
            taken.append((time.perf_counter() - began) * 1e3)
    return taken


def flood(url: str) -> None:
    """Client A: the corpus, over and over, until killed.

    An attacker has a machine of its own. The lowest priority keeps this process from the cores that
    the gateway and client B need.
    """
    os.nice(19)
    cases = corpus(1_000_000)
    with httpx.Client(base_url=url, timeout=120) as http:
        while True:
            for case in cases:
                with contextlib.suppress(httpx.TransportError):
                    http.post(case.path, content=case.body, headers={"content-type": case.kind})


def measure_fairness(gateway: Gateway, seconds: float, figures: dict[str, float]) -> None:
    alone = latencies(gateway.url, seconds)
    attacker = subprocess.Popen([sys.executable, "-m", "bench.hostile", "--flood", gateway.url])
    try:
        time.sleep(1.5)
        beside = latencies(gateway.url, seconds)
    finally:
        attacker.kill()
        attacker.wait()
    for name, taken in (("alone", alone), ("flooded", beside)):
        figures[f"client_b.{name}.p50_ms"] = percentile(taken, 50)
        figures[f"client_b.{name}.p99_ms"] = percentile(taken, 99)
    figures["client_b.p99_ratio"] = figures["client_b.flooded.p99_ms"] / figures["client_b.alone.p99_ms"]


def show(figures: dict[str, float]) -> None:
    table = Table("body", "bytes", "status", "stall, CPU ms", "stall, wall ms", "memory / byte")
    for name in [n.removesuffix(".status") for n in figures if n.endswith(".status")]:
        cells = [figures[f"{name}.{c}"] for c in ("bytes", "status", "stall_cpu_ms", "stall_wall_ms", "memory_per_byte")]
        table.add_row(name, f"{cells[0]:,.0f}", f"{cells[1]:.0f}", *(f"{c:.1f}" for c in cells[2:]))
    Console(width=130).print(table)
    for name, value in figures.items():
        if name.startswith(("crowd", "client_b", "worst", "load")):
            print(f"{name}: {value:.2f}")
    print(f"goals: {GOALS}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="1 MB bodies, 500 connections")
    parser.add_argument(
        "--seconds", type=float, default=None, help="of each measurement of client B's latency (default 15; 3 with --short)"
    )
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--serve", type=Path, default=None, help=argparse.SUPPRESS)
    parser.add_argument("--flood", default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve is not None:
        sys.exit(serve(options.serve))
    if options.flood is not None:
        flood(options.flood)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    size, idle, slow, seconds = (1_000_000, 500, 10, 3.0) if options.short else (6_000_000, 10_000, 50, 15.0)
    seconds = seconds if options.seconds is None else options.seconds
    figures: dict[str, float] = {"load_average_before": os.getloadavg()[0]}
    with running() as gateway:
        run_corpus(gateway, size, figures)
        measure_fairness(gateway, seconds, figures)
        asyncio.run(crowd(gateway, idle, slow, figures))
    for figure in ("stall_cpu_ms", "memory_per_byte"):
        figures[f"worst.{figure}"] = max(v for n, v in figures.items() if n.endswith(figure))
    figures["load_average_after"] = os.getloadavg()[0]
    show(figures)
    write(options.json, figures)


if __name__ == "__main__":
    main()
