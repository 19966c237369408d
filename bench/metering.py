"""What metering costs a gateway: `python -m bench.metering [--pairs N] [--slices N]
[--short-slices N] [--json FILE]`.

One gateway process and the engine of prepared tokens, which answers at once: any other engine takes
longer for a request, so that metering is a smaller part of it. The gateway meters the requests of
one key and not those of another one, for which its `Gateway._meter` does nothing. A process that
confirms reports stands for the ledger.

A pair is the same request with both keys on one connection, in alternating order. A slice is a time
of requests by 16 connections with one of the keys, in turns, and then a pause in which the gateway
reports what it has recorded. The CPU time of the gateway in a slice has the pause, and so the
reports; its ratio is what metering takes from a gateway that has a core of its own. The throughput
is measured in short slices without a pause, with all processes on the same cores: two neighbours
have the same speed of a machine whose speed varies, and reports, which take a thousandth of what
records take, fall into slices of both keys. The run is repeated with a new gateway.

Beside other work the CPU time of slices varies by more than what metering takes. Therefore the
gateway also adds up the CPU time of the thread in its two parts: recording a request, and making a
report of the sums. What they displace from the processor's caches is not in it.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import json
import runpy
import statistics
import sys
import tempfile
import time
from collections.abc import Container
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from bench.key_limits import ADMIN_KEY, add_key, await_key, interval
from bench.prepared_engine import FREE
from bench.raw_client import Connection, cpu_s, post_of, send_load
from bench.report import write
from bench.warm_targets import Processes, start_nats
from services.gateway.domain.usage_reports import RecentUsage
from services.gateway.loop import Gateway
from services.gateway.requests.active_request import ActiveRequest
from services.gateway.telemetry.request_log import RequestOrigin
from shared.contracts.usage import REPORT_INTERVAL_S, ReportUsage
from shared.ports import free_port

METERED, PLAIN = "metered", "plain"
_BODY = {"model": FREE, "messages": [{"role": "user", "content": "?"}], "max_tokens": 1}
_REQUESTS = {name: post_of("/v1/chat/completions", _BODY, {"authorization": f"Bearer sk-{name}"}) for name in (METERED, PLAIN)}
_WARM_UP = 200
_CLIENTS = 16
_PAUSE_S = REPORT_INTERVAL_S + 0.5
_RUNS = 2
_SHORT_S = 0.25
"""Seconds of a slice in which the throughput is measured."""
_END_TIMEOUT_S = 30.0


class Costs:
    """CPU nanoseconds of the parts of metering in this process.

    Attributes:
        requests: Metered requests.
    """

    def __init__(self) -> None:
        self.requests = self.record_ns = self.report_ns = 0

    def write(self, path: Path) -> None:
        """Write microseconds for a request."""
        costs = {"record_us": self.record_ns, "report_us": self.report_ns}
        path.write_text(json.dumps({name: ns / 1e3 / max(1, self.requests) for name, ns in costs.items()}))


def run_gateway(costs_path: Path) -> None:
    """Run a gateway that records no usage of one of the keys, and writes its `Costs` at its end."""
    costs, meter, build = Costs(), Gateway._meter, RecentUsage.build

    def meter_unless_plain(self: Gateway, request: ActiveRequest, origin: RequestOrigin) -> None:
        is_metered = origin.caller.name != PLAIN
        begun = time.thread_time_ns()
        if is_metered:
            meter(self, request, origin)
        took_ns = time.thread_time_ns() - begun  # asked for both keys, so that it is no difference
        if is_metered:
            costs.record_ns += took_ns
            costs.requests += 1

    def build_timed(self: RecentUsage, spool: str, end: int, unsettled: Container[str]) -> ReportUsage:
        begun = time.thread_time_ns()
        report = build(self, spool, end, unsettled)
        costs.report_ns += time.thread_time_ns() - begun
        return report

    Gateway._meter = meter_unless_plain  # type: ignore[method-assign]
    RecentUsage.build = build_timed  # type: ignore[method-assign]
    atexit.register(costs.write, costs_path)
    sys.argv = ["services.gateway"]
    runpy.run_module("services.gateway", run_name="__main__")


def take_pairs(port: int, count: int) -> list[float]:
    """Return the additional milliseconds of the request with metering, for each pair."""
    found = []
    with Connection(port) as connection:
        for number in range(_WARM_UP + count):
            took = {}
            for name in _in_order(number):
                begun = time.perf_counter()
                connection.ask(_REQUESTS[name])
                took[name] = (time.perf_counter() - begun) * 1e3
            if number >= _WARM_UP:
                found.append(took[METERED] - took[PLAIN])
    return found


def _in_order(number: int) -> tuple[str, str]:
    return (METERED, PLAIN) if number % 2 else (PLAIN, METERED)


def take_slice(port: int, gateway: psutil.Process, name: str, seconds: float) -> float:
    """Return the gateway's CPU microseconds for a request with a key."""
    before = cpu_s(gateway.pid)
    count, _ = send_load(port, _REQUESTS[name], _CLIENTS, seconds)
    time.sleep(_PAUSE_S)
    return (cpu_s(gateway.pid) - before) * 1e6 / count


def take_throughput(port: int, name: str) -> float:
    """Return requests per second with a key."""
    count, took_s = send_load(port, _REQUESTS[name], _CLIENTS, _SHORT_S)
    return count / took_s


@dataclass
class Measured:
    """What one or more gateways took.

    Attributes:
        added_ms: Additional milliseconds of each pair.
        slices: Results of `take_slice` by key.
        throughputs: Results of `take_throughput` by key.
        costs: What each gateway wrote as its `Costs`.
    """

    added_ms: list[float] = field(default_factory=list)
    slices: list[dict[str, float]] = field(default_factory=list)
    throughputs: list[dict[str, float]] = field(default_factory=list)
    costs: list[dict[str, float]] = field(default_factory=list)


def measure(measured: Measured, pairs: int, slices: int, seconds: float, short_slices: int) -> None:
    """Measure with a new gateway."""
    with tempfile.TemporaryDirectory(prefix="thaw-bench-") as directory, contextlib.ExitStack() as stack:
        processes = Processes(Path(directory), stack)
        nats_url, _ = start_nats(processes, Path(directory))
        processes.start("ledger", [sys.executable, "-m", "bench.prepared_ledger", "--nats", nats_url])
        processes.start("engine", [sys.executable, "-m", "bench.prepared_engine", "--nats", nats_url, "--port", str(free_port())])
        port = free_port()
        environment = {
            "THAW_NATS_URL": nats_url,
            "THAW_GATEWAY_PORT": str(port),
            "THAW_HOME": directory,
            "THAW_ADMIN_KEY": ADMIN_KEY,
        }
        costs = Path(directory) / "costs.json"
        gateway = processes.start("gateway", [sys.executable, "-m", "bench.metering", "--gateway", str(costs)], environment)
        processes.await_answer("gateway", port, FREE)
        for name in (METERED, PLAIN):
            add_key(port, name, f"sk-{name}", {})
            await_key(port, f"sk-{name}")
        measured.added_ms += take_pairs(port, pairs)
        time.sleep(_PAUSE_S)
        for number in range(short_slices):
            measured.throughputs.append({name: take_throughput(port, name) for name in _in_order(number)})
        time.sleep(_PAUSE_S)
        for number in range(slices):
            measured.slices.append({name: take_slice(port, gateway, name, seconds) for name in _in_order(number)})
        gateway.terminate()
        gateway.wait(_END_TIMEOUT_S)
        measured.costs.append(json.loads(costs.read_text()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=1500)
    parser.add_argument("--slices", type=int, default=10, help="with each key and gateway")
    parser.add_argument("--seconds", type=float, default=2.0, help="of a slice, without the pause")
    parser.add_argument("--short-slices", type=int, default=300, help="with each key and gateway, for the throughput")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--gateway", type=Path, metavar="COSTS", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.gateway:
        run_gateway(options.gateway)
        return
    measured = Measured()
    for _ in range(_RUNS):
        measure(measured, options.pairs, options.slices, options.seconds, options.short_slices)
    slices, throughputs = measured.slices, measured.throughputs
    figures = {name: statistics.mean(costs[name] for costs in measured.costs) for name in measured.costs[0]}
    for name, values in (
        ("added_ms", measured.added_ms),
        ("added_cpu_us", [s[METERED] - s[PLAIN] for s in slices]),
        ("cpu_ratio", [s[METERED] / s[PLAIN] for s in slices]),
        ("throughput_ratio", [s[METERED] / s[PLAIN] for s in throughputs]),
    ):
        low, high = interval(values)
        figures |= {name: statistics.median(values), f"{name}_low": low, f"{name}_high": high}
    print(_describe(figures))
    write(options.json, figures)


def _describe(figures: dict[str, float]) -> str:
    def text(name: str, factor: float, form: str) -> str:
        value, low, high = (format(figures[name + end] * factor, form) for end in ("", "_low", "_high"))
        return f"{value} ({low} to {high})"

    return (
        f"recording a request takes {figures['record_us']:.1f} us of CPU time, and reporting it {figures['report_us']:.2f} us; "
        f"metering adds {text('added_ms', 1e3, '+.0f')} us to a request, and {text('added_cpu_us', 1, '+.0f')} us of the gateway's "
        f"CPU time, which is {text('cpu_ratio', 1, '.3f')} x that without; throughput {text('throughput_ratio', 1, '.3f')} x "
        "(medians, 95 % intervals)"
    )


if __name__ == "__main__":
    main()
