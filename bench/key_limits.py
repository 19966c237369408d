"""Cost of a key's limits to a warm request: `python -m bench.key_limits [--pairs N] [--part PART]`.

Two gateway processes and the engine of prepared tokens; a process that knows
prices stands for the ledger. A pair is one request with a key without limits and one with a key
that has all limits, one after the other on the same connection, in alternating order. One gateway
owns the limited key; the other leases from it. The client reads no header but the length: with
`--client httpx` the time contains that library's reading of six more headers as well.

Blocks of requests with one of the keys, in turns, show the CPU time of the gateway for a request.

With `--part propagation` it measures instead how long a change of a key takes: from the request at
one gateway until the other gateway lists the key's models accordingly, `--pairs` times.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import psutil

from bench.prepared_engine import FREE
from bench.raw_client import Connection, cpu_s, post_of
from bench.report import write
from bench.warm_targets import Processes, start_nats
from shared.percentiles import percentile
from shared.ports import free_port

ADMIN_KEY = "bench-admin"
ADMIN = {"authorization": f"Bearer {ADMIN_KEY}"}
PLAIN, LIMITED = "sk-plain", "sk-limited"
_LIMITS = {
    "requests_per_minute": 10**7,
    "tokens_per_minute": 10**9,
    "concurrent_requests": 1000,
    "tokens_per_day": 10**12,
    "device_seconds_per_day": 10**9,
    "money_per_month": 10**9,
    "models": ["*"],
}
_PATH = "/v1/chat/completions"
_BODY = {"model": FREE, "messages": [{"role": "user", "content": "?"}], "max_tokens": 1}
_WARM_UP = 200
_BLOCK = 25
"""Requests between two readings of the CPU time."""
_RESAMPLES = 500
_PROPAGATION_BOUND_S = 30.0


def add_key(port: int, name: str, key: str, limits: dict[str, object]) -> None:
    body = {"name": name, "sha256": hashlib.sha256(key.encode()).hexdigest()} | limits
    httpx.post(f"http://127.0.0.1:{port}/admin/v1/keys", json=body, headers=ADMIN, timeout=30).raise_for_status()


def await_key(port: int, key: str) -> None:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        answer = httpx.get(f"http://127.0.0.1:{port}/v1/models", headers={"authorization": f"Bearer {key}"}, timeout=10)
        if answer.is_success:
            return
        time.sleep(0.05)
    raise RuntimeError("a gateway does not know the key")


_PARTS = {
    "all": _LIMITS,
    "limits": {name: value for name, value in _LIMITS.items() if not name.endswith(("_per_day", "_per_month"))},
    "budgets": {name: value for name, value in _LIMITS.items() if name.endswith(("_per_day", "_per_month"))},
}


Ask = Callable[[str], bool]
"""Send a request with a key; return whether the response has the limits."""


@contextlib.contextmanager
def raw_client(port: int) -> Iterator[Ask]:
    """Ask with `bench.raw_client`."""
    requests = {key: post_of(_PATH, _BODY, {"authorization": f"Bearer {key}"}) for key in (PLAIN, LIMITED)}
    with Connection(port) as connection:
        yield lambda key: b"x-ratelimit-limit-tokens" in connection.ask(requests[key])


@contextlib.contextmanager
def httpx_client(port: int) -> Iterator[Ask]:
    """Ask with httpx, as clients do."""

    def ask(key: str) -> bool:
        answer = client.post(_PATH, json=_BODY, headers={"authorization": f"Bearer {key}"})
        return "x-ratelimit-limit-tokens" in answer.raise_for_status().headers

    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as client:
        yield ask


_CLIENTS = {"raw": raw_client, "httpx": httpx_client}


def take_pairs(ask: Ask, count: int, *, has_headers: bool = True) -> list[float]:
    """Return the additional milliseconds of the request with limits, for each pair."""
    found = []
    for number in range(_WARM_UP + count):
        took = {}
        for key in _in_order(number):
            begun = time.perf_counter()
            is_limited = ask(key)
            took[key] = (time.perf_counter() - begun) * 1e3
            if is_limited is not (key == LIMITED and has_headers):
                raise RuntimeError("the limits were not counted")
        if number >= _WARM_UP:
            found.append(took[LIMITED] - took[PLAIN])
    return found


def take_cpu(ask: Ask, gateway: psutil.Process, blocks: int) -> list[float]:
    """Return the gateway's additional CPU microseconds for a request, for each pair of blocks."""
    found = []
    for number in range(blocks):
        used = {}
        for key in _in_order(number):
            before = cpu_s(gateway.pid)
            for _ in range(_BLOCK):
                ask(key)
            used[key] = (cpu_s(gateway.pid) - before) * 1e6 / _BLOCK
        found.append(used[LIMITED] - used[PLAIN])
    return found


def _in_order(number: int) -> tuple[str, str]:
    return (PLAIN, LIMITED) if number % 2 else (LIMITED, PLAIN)


def take_propagations(ports: list[int], count: int) -> list[float]:
    """Return the milliseconds until a change of a key at one gateway holds at the other."""
    found = []
    with contextlib.ExitStack() as stack:
        changing, watching = (
            stack.enter_context(httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30, headers=headers))
            for port, headers in zip(ports, (ADMIN, {"authorization": f"Bearer {LIMITED}"}), strict=True)
        )
        for number in range(count):
            is_allowed = bool(number % 2)
            models = ["*"] if is_allowed else ["no-model"]
            begun = time.perf_counter()
            changing.patch("/admin/v1/keys/limited", json={"models": models}).raise_for_status()
            while bool(watching.get("/v1/models").raise_for_status().json()["data"]) is not is_allowed:
                if time.perf_counter() - begun > _PROPAGATION_BOUND_S:
                    raise RuntimeError("a gateway does not learn of the change")
            found.append((time.perf_counter() - begun) * 1e3)
    return found


def interval(values: list[float]) -> tuple[float, float]:
    """Return the bootstrap's 95 % interval of the median."""
    draw = random.Random(1)
    medians = [statistics.median(draw.choices(values, k=len(values))) for _ in range(_RESAMPLES)]
    return percentile(medians, 2.5), percentile(medians, 97.5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=1500)
    parser.add_argument("--blocks", type=int, default=100, help=f"of {_BLOCK} requests with each key")
    parser.add_argument("--client", choices=_CLIENTS, default="raw")
    parts = (*_PARTS, "propagation")
    parser.add_argument("--part", choices=parts, default="all", help="which of the limits the key has, or the time of a change")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="thaw-bench-") as directory, contextlib.ExitStack() as stack:
        processes = Processes(Path(directory), stack)
        nats_url, _ = start_nats(processes, Path(directory))
        processes.start("engine", [sys.executable, "-m", "bench.prepared_engine", "--nats", nats_url, "--port", str(free_port())])
        processes.start("ledger", [sys.executable, "-m", "bench.prepared_ledger", "--nats", nats_url])
        ports, gateways = [free_port(), free_port()], []
        for number, port in enumerate(ports):
            environment = {
                "THAW_NATS_URL": nats_url,
                "THAW_GATEWAY_PORT": str(port),
                "THAW_HOME": f"{directory}/{number}",
                "THAW_ADMIN_KEY": ADMIN_KEY,
            }
            command = [sys.executable, "-m", "services.gateway"]
            gateways.append(processes.start(f"gateway-{number}", command, environment))
        for number, port in enumerate(ports):
            processes.await_answer(f"gateway-{number}", port, FREE)
        add_key(ports[0], "plain", PLAIN, {})
        add_key(ports[0], "limited", LIMITED, _PARTS.get(options.part, {}))
        for port in ports:
            await_key(port, LIMITED)
        if options.part == "propagation":
            took = take_propagations(ports, options.pairs)
            figures = {"median_ms": statistics.median(took), "p99_ms": percentile(took, 99), "max_ms": max(took)}
            print(f"{len(took)} changes: " + ", ".join(f"{name} {value:.1f}" for name, value in figures.items()))
            write(options.json, figures)
            return
        for number, (port, gateway) in enumerate(zip(ports, gateways, strict=True)):
            with _CLIENTS[options.client](port) as ask:
                pairs = take_pairs(ask, options.pairs, has_headers=options.part != "budgets")
                cpu = take_cpu(ask, gateway, options.blocks)
            (low, high), (cpu_low, cpu_high) = interval(pairs), interval(cpu)
            figures[f"gateway_{number}_added_ms"] = statistics.median(pairs)
            figures[f"gateway_{number}_added_cpu_us"] = statistics.median(cpu)
            print(
                f"gateway {number}: {statistics.median(pairs) * 1e3:+.0f} us a request, 95 % {low * 1e3:+.0f} to {high * 1e3:+.0f} us; "
                f"CPU time of the gateway {statistics.median(cpu):+.0f} us, 95 % {cpu_low:+.0f} to {cpu_high:+.0f} us"
            )
    write(options.json, figures)


if __name__ == "__main__":
    main()
