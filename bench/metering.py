"""What metering costs: `python -m bench.metering [--pairs N] [--slices N] [--json FILE]`.

Two gateway processes and the engine of prepared tokens. One of the gateways is without metering:
its `Gateway._meter` does nothing. A pair is the same request to both, in alternating order; a slice
of throughput is two seconds of requests from 16 clients at one of them, in turns. The run is done
twice, with the gateways started in either order, as two equal processes may differ. A process that
acknowledges reports stands for the ledger, which is not on the path of requests.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import runpy
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path

import httpx
import nats

from bench.key_limits import interval
from bench.prepared_engine import FREE
from bench.report import write
from bench.warm_targets import Processes, start_nats
from services.gateway.loop import Gateway
from shared.contracts import subjects
from shared.contracts.usage import ReportUsage, UsageRecorded
from shared.ports import free_port

METERED, PLAIN = "metered", "plain"
_BODY = {"model": FREE, "messages": [{"role": "user", "content": "?"}], "max_tokens": 1}
_WARM_UP = 200
_CLIENTS = 16
_SLICE_S = 2.0


async def acknowledge(nats_url: str) -> None:
    """Reply to each report that the ledger has it."""
    client = await nats.connect(nats_url)
    async for message in (await client.subscribe(subjects.USAGE)).messages:
        report = ReportUsage.model_validate_json(message.data)
        await message.respond(UsageRecorded(position=report.end).model_dump_json().encode())


def run_unmetered_gateway() -> None:
    """Run a gateway that records no usage."""
    Gateway._meter = lambda self, request, origin: None  # type: ignore[method-assign]
    sys.argv = ["services.gateway"]
    runpy.run_module("services.gateway", run_name="__main__")


def take_pairs(ports: dict[str, int], count: int) -> list[float]:
    """Return the additional milliseconds of the request with metering, for each pair."""
    found = []
    with contextlib.ExitStack() as stack:
        clients = {
            name: stack.enter_context(httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30)) for name, port in ports.items()
        }
        for number in range(_WARM_UP + count):
            took = {}
            for name in (METERED, PLAIN) if number % 2 else (PLAIN, METERED):
                begun = time.perf_counter()
                clients[name].post("/v1/chat/completions", json=_BODY).raise_for_status()
                took[name] = (time.perf_counter() - begun) * 1e3
            if number >= _WARM_UP:
                found.append(took[METERED] - took[PLAIN])
    return found


def take_rate(port: int) -> float:
    """Return the requests per second of some clients."""
    until = time.monotonic() + _SLICE_S
    counts = [0] * _CLIENTS

    def ask(number: int) -> None:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as client:
            while time.monotonic() < until:
                client.post("/v1/chat/completions", json=_BODY).raise_for_status()
                counts[number] += 1

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(_CLIENTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(counts) / _SLICE_S


def measure(first: str, pairs: int, slices: int) -> tuple[list[float], list[float]]:
    """Measure with one order of the gateways' start.

    Returns:
        Additional milliseconds of each pair, and ratios of throughput with and without metering.
    """
    with tempfile.TemporaryDirectory(prefix="thaw-bench-") as directory, contextlib.ExitStack() as stack:
        processes = Processes(Path(directory), stack)
        nats_url, _ = start_nats(processes, Path(directory))
        this = [sys.executable, "-m", "bench.metering"]
        processes.start("ledger", [*this, "--acknowledge", nats_url])
        processes.start("engine", [sys.executable, "-m", "bench.prepared_engine", "--nats", nats_url, "--port", str(free_port())])
        ports = {name: free_port() for name in ((METERED, PLAIN) if first == METERED else (PLAIN, METERED))}
        for name, port in ports.items():
            environment = {"THAW_NATS_URL": nats_url, "THAW_GATEWAY_PORT": str(port), "THAW_HOME": f"{directory}/{name}"}
            command = [sys.executable, "-m", "services.gateway"] if name == METERED else [*this, "--unmetered-gateway"]
            processes.start(name, command, environment)
            processes.await_answer(name, port, FREE)
        added = take_pairs(ports, pairs)
        ratios = []
        for number in range(slices):
            order = (METERED, PLAIN) if number % 2 else (PLAIN, METERED)
            rates = {name: take_rate(ports[name]) for name in order}
            ratios.append(rates[METERED] / rates[PLAIN])
        return added, ratios


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=1500)
    parser.add_argument("--slices", type=int, default=10, help="of throughput, for each gateway and order")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--acknowledge", metavar="URL", help=argparse.SUPPRESS)
    parser.add_argument("--unmetered-gateway", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.acknowledge:
        asyncio.run(acknowledge(options.acknowledge))
        return
    if options.unmetered_gateway:
        run_unmetered_gateway()
        return
    added: list[float] = []
    ratios: list[float] = []
    for first in (METERED, PLAIN):
        more, rates = measure(first, options.pairs, options.slices)
        low, high = interval(more)
        print(f"{first} first: {statistics.median(more) * 1e3:+.0f} us a request, 95 % {low * 1e3:+.0f} to {high * 1e3:+.0f} us")
        added += more
        ratios += rates
    low, high = interval(added)
    figures = {
        "added_ms": statistics.median(added),
        "added_low_ms": low,
        "added_high_ms": high,
        "throughput_ratio": statistics.median(ratios),
    }
    print(
        f"both: {figures['added_ms'] * 1e3:+.0f} us a request, 95 % {low * 1e3:+.0f} to {high * 1e3:+.0f} us; "
        f"throughput {figures['throughput_ratio']:.3f} x without metering"
    )
    write(options.json, figures)


if __name__ == "__main__":
    main()
