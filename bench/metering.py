"""What metering costs a gateway: `python -m bench.metering [--pairs N] [--slices N] [--json FILE]`.

One gateway process and the engine of prepared tokens, which answers at once: any other engine takes
longer for a request, so that metering is a smaller part of it. The gateway meters the requests of
one key and not those of another one, for which its `Gateway._meter` does nothing. A process that
confirms reports stands for the ledger.

A pair is the same request with both keys on one connection, in alternating order. A slice is a time
of requests by 16 connections with one of the keys, in turns, and then a pause in which the gateway
reports what it has recorded. The CPU time of the gateway in a slice has the pause, and so the
reports; its ratio is what metering takes from a gateway that has a core of its own. The throughput
is measured in the same slices, with all processes on the same cores. The run is repeated with a new
gateway.
"""

from __future__ import annotations

import argparse
import contextlib
import runpy
import statistics
import sys
import tempfile
import time
from pathlib import Path

import psutil

from bench.key_limits import ADMIN_KEY, add_key, await_key, interval
from bench.prepared_engine import FREE
from bench.raw_client import Connection, cpu_s, post_of, take_rate
from bench.report import write
from bench.warm_targets import Processes, start_nats
from services.gateway.loop import Gateway
from services.gateway.requests.active_request import ActiveRequest
from services.gateway.telemetry.request_log import RequestOrigin
from shared.contracts.usage import REPORT_INTERVAL_S
from shared.ports import free_port

METERED, PLAIN = "metered", "plain"
_BODY = {"model": FREE, "messages": [{"role": "user", "content": "?"}], "max_tokens": 1}
_REQUESTS = {name: post_of("/v1/chat/completions", _BODY, {"authorization": f"Bearer sk-{name}"}) for name in (METERED, PLAIN)}
_WARM_UP = 200
_CLIENTS = 16
_PAUSE_S = REPORT_INTERVAL_S + 0.5
_RUNS = 2


def run_gateway() -> None:
    """Run a gateway that records no usage of one of the keys."""
    meter = Gateway._meter

    def meter_unless_plain(self: Gateway, request: ActiveRequest, origin: RequestOrigin) -> None:
        if origin.caller.name != PLAIN:
            meter(self, request, origin)

    Gateway._meter = meter_unless_plain  # type: ignore[method-assign]
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


def take_slice(port: int, gateway: psutil.Process, name: str, seconds: float) -> tuple[float, float]:
    """Return requests per second with a key, and the gateway's CPU microseconds for a request."""
    before = cpu_s(gateway.pid)
    rate = take_rate(port, _REQUESTS[name], _CLIENTS, seconds)
    time.sleep(_PAUSE_S)
    return rate, (cpu_s(gateway.pid) - before) * 1e6 / (rate * seconds)


def measure(pairs: int, slices: int, seconds: float) -> tuple[list[float], list[dict[str, tuple[float, float]]]]:
    """Measure with a new gateway.

    Returns:
        Additional milliseconds of each pair, and the results of `take_slice` by key.
    """
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
        gateway = processes.start("gateway", [sys.executable, "-m", "bench.metering", "--gateway"], environment)
        processes.await_answer("gateway", port, FREE)
        for name in (METERED, PLAIN):
            add_key(port, name, f"sk-{name}", {})
            await_key(port, f"sk-{name}")
        added = take_pairs(port, pairs)
        time.sleep(_PAUSE_S)
        return added, [{name: take_slice(port, gateway, name, seconds) for name in _in_order(number)} for number in range(slices)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=1500)
    parser.add_argument("--slices", type=int, default=10, help="with each key and gateway")
    parser.add_argument("--seconds", type=float, default=2.0, help="of a slice, without the pause")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--gateway", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.gateway:
        run_gateway()
        return
    added: list[float] = []
    slices: list[dict[str, tuple[float, float]]] = []
    for _ in range(_RUNS):
        more, taken = measure(options.pairs, options.slices, options.seconds)
        added += more
        slices += taken
    figures: dict[str, float] = {}
    for name, values in (
        ("added_ms", added),
        ("added_cpu_us", [s[METERED][1] - s[PLAIN][1] for s in slices]),
        ("cpu_ratio", [s[METERED][1] / s[PLAIN][1] for s in slices]),
        ("throughput_ratio", [s[METERED][0] / s[PLAIN][0] for s in slices]),
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
        f"metering adds {text('added_ms', 1e3, '+.0f')} us to a request, and {text('added_cpu_us', 1, '+.0f')} us of the gateway's "
        f"CPU time, which is {text('cpu_ratio', 1, '.3f')} x that without; throughput {text('throughput_ratio', 1, '.3f')} x "
        "(medians, 95 % intervals)"
    )


if __name__ == "__main__":
    main()
