"""Measure the cost of metering to a gateway: `python -m bench.metering [--engine prepared|builtin]
[--tokens N] [--pairs N] [--slices N] [--short-slices N] [--json FILE]`.

The engine is that of prepared tokens, which answers at once: any other engine takes longer for a
request, so that metering is a smaller part of it. A process that confirms reports stands for the
ledger. With `--engine builtin` the gateway is a second one of a whole mesh, and the demo model of
5 million parameters computes each response. The gateway meters the requests of one key and not
those of another one, for which its `Gateway._meter` does nothing.

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
import yaml

from bench.key_limits import ADMIN_KEY, add_key, await_key, interval
from bench.own_mesh import own_mesh
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
from thaw.demo.models import make_demo_model

METERED, PLAIN = "metered", "plain"
PREPARED, BUILTIN = "prepared", "builtin"
_MODEL = "metered-5m"
_WARM_UP = {PREPARED: 200, BUILTIN: 20}
"""Pairs before those that count."""
_CLIENTS = 16
_PAUSE_S = REPORT_INTERVAL_S + 0.5
_RUNS = 2
_SHORT_S = {PREPARED: 0.25, BUILTIN: 1.0}
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


@dataclass(frozen=True)
class Target:
    """A gateway to be measured.

    Attributes:
        port: Of the gateway.
        requests: The encoded request with either key.
    """

    port: int
    requests: dict[str, bytes]

    @classmethod
    def build(cls, port: int, model: str, tokens: int) -> Target:
        """Ask for some tokens of a model."""
        body = {"model": model, "messages": [{"role": "user", "content": "?"}], "max_tokens": tokens, "ignore_eos": True}
        keys = {name: {"authorization": f"Bearer sk-{name}"} for name in (METERED, PLAIN)}
        return cls(port, {name: post_of("/v1/chat/completions", body, key) for name, key in keys.items()})

    def take_pairs(self, count: int, warm_up: int) -> list[float]:
        """Return the additional milliseconds of the request with metering, for each pair.

        Args:
            count: Of pairs.
            warm_up: Number of pairs before them.
        """
        found = []
        with Connection(self.port) as connection:
            for number in range(warm_up + count):
                took = {}
                for name in _in_order(number):
                    begun = time.perf_counter()
                    connection.ask(self.requests[name])
                    took[name] = (time.perf_counter() - begun) * 1e3
                if number >= warm_up:
                    found.append(took[METERED] - took[PLAIN])
        return found

    def take_slice(self, gateway: psutil.Process, name: str, seconds: float) -> float:
        """Return the gateway's CPU microseconds for a request with a key."""
        before = cpu_s(gateway.pid)
        count, _ = send_load(self.port, self.requests[name], _CLIENTS, seconds)
        time.sleep(_PAUSE_S)
        return (cpu_s(gateway.pid) - before) * 1e6 / count

    def take_throughput(self, name: str, seconds: float) -> float:
        """Return requests per second with a key."""
        count, took_s = send_load(self.port, self.requests[name], _CLIENTS, seconds)
        return count / took_s


def _in_order(number: int) -> tuple[str, str]:
    return (METERED, PLAIN) if number % 2 else (PLAIN, METERED)


@dataclass
class Measured:
    """The measurements of one or more gateways.

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


def _start_prepared(processes: Processes, directory: Path) -> dict[str, str]:
    """Start the engine of prepared tokens; return the gateway's settings."""
    nats_url, _ = start_nats(processes, directory)
    processes.start("ledger", [sys.executable, "-m", "bench.prepared_ledger", "--nats", nats_url])
    processes.start("engine", [sys.executable, "-m", "bench.prepared_engine", "--nats", nats_url, "--port", str(free_port())])
    return {"THAW_NATS_URL": nats_url, "THAW_HOME": str(directory)}


def _start_builtin(stack: contextlib.ExitStack, directory: Path) -> dict[str, str]:
    """Start a mesh with the demo model; return the settings of a second gateway."""
    model = {"name": _MODEL, "source": str(make_demo_model(directory / "model", "5m")), "keep_alive": -1}
    config = directory / "thaw.yaml"
    config.write_text(yaml.safe_dump({"mesh": {"nodes": {"node-0": {"cpu:0": "3GiB"}}}, "models": [model]}))
    environment = stack.enter_context(own_mesh("--config", str(config)))
    endpoints = json.loads((Path(environment["THAW_HOME"]) / "run" / "endpoints.json").read_text())
    return {"THAW_NATS_URL": endpoints["nats_url"], "THAW_HOME": environment["THAW_HOME"]}


def measure(measured: Measured, options: argparse.Namespace) -> None:
    """Measure with a new gateway."""
    with tempfile.TemporaryDirectory(prefix="thaw-bench-") as directory, contextlib.ExitStack() as stack:
        processes = Processes(Path(directory), stack)
        if is_builtin := options.engine == BUILTIN:
            settings = _start_builtin(stack, Path(directory))
        else:
            settings = _start_prepared(processes, Path(directory))
        model, port, costs = _MODEL if is_builtin else FREE, free_port(), Path(directory) / "costs.json"
        settings |= {"THAW_GATEWAY_PORT": str(port), "THAW_ADMIN_KEY": ADMIN_KEY}
        gateway = processes.start("gateway", [sys.executable, "-m", "bench.metering", "--gateway", str(costs)], settings)
        processes.await_answer("gateway", port, model)
        for name in (METERED, PLAIN):
            add_key(port, name, f"sk-{name}", {})
            await_key(port, f"sk-{name}")
        target = Target.build(port, model, options.tokens)
        measured.added_ms += target.take_pairs(options.pairs, _WARM_UP[options.engine])
        time.sleep(_PAUSE_S)
        for number in range(options.short_slices):
            seconds = _SHORT_S[options.engine]
            measured.throughputs.append({name: target.take_throughput(name, seconds) for name in _in_order(number)})
        time.sleep(_PAUSE_S)
        for number in range(options.slices):
            measured.slices.append({name: target.take_slice(gateway, name, options.seconds) for name in _in_order(number)})
        gateway.terminate()
        gateway.wait(_END_TIMEOUT_S)
        measured.costs.append(json.loads(costs.read_text()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=(PREPARED, BUILTIN), default=PREPARED)
    parser.add_argument("--tokens", type=int, default=1, help="of a response")
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
        measure(measured, options)
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
