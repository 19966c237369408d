"""Find what grows in a mesh that serves for hours: the slope per hour of each resource, and its
value in a month.

    python -m bench.soak [--hours N] [--rate N] [--compare MINUTES] [--suspend auto|off]
        [--directory DIR] [--json PATH]
    python -m bench.soak --report DIR [--json PATH]

`thaw up` starts two nodes under a state directory of its own. One small model is pinned; three more
compete for memory that holds two of them, so that swaps never stop: where the machine can suspend
them their engines are suspended and resumed, with `--suspend off` they are stopped and started. The
load is steady (bench/soak_load.py): RATE requests a second, streamed, whole, keyed, for an adapter,
cancelled and malformed. Every 30 s, or a two-hundredth of the time if that is less, everything is
counted (bench/soak_census.py); samples and requests are appended to files in DIR (a temporary
directory by default), and `--report` prints what they say by then, during the run too. With
`--compare` a new mesh is started at the end, and both get the same requests in turn
(bench/soak_age.py): whether age alone has changed the time to first token.

The first twelfth is left out as warm-up. The slope is Theil and Sen's with its 95 % interval
(bench/trend.py); that of the second half alone stands beside it, and does not judge. A verdict is
  level  the interval includes zero, or lies below it;
  fits   it grows, and a month of that (no further than the store's own bound, if it has one) fits
         the machine;
  FILLS  a month of that is more than the machine has.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.report import write
from bench.soak_age import Ratio, compare, ratios
from bench.soak_census import Counter, stamp_census
from bench.soak_load import DECK, MALFORMED, Load, SentRequest
from bench.trend import LEAST_SAMPLES, Trend, theil_sen
from shared.contracts.models import ModelSpec
from shared.contracts.traces import TRACE_MAX_COUNT
from shared.percentiles import percentile
from shared.sizing import need_of
from tests.support.adapters import write_adapter
from tests.support.launcher import Thaw
from thaw.cli.api import Api
from thaw.cli.demo import card_of
from thaw.demo.models import make_demo_model
from thaw.errors import CommandError
from thaw.launcher.home import Home
from thaw.launcher.logfiles import LIMIT_BYTES
from thaw.launcher.servers import NATS_MEMORY_BYTES

STEADY, COMPETING, ADAPTER = "steady", ("one", "two", "three"), "style"
MONTH_H = 720.0
WARM_UP = 1 / 12
_LEAST_REQUESTS = 20
_LEAST_INTERVAL_S = 2.0
_TRACED_WITHIN_S = 5.0
_ALL = "mesh"
"""The sum of all processes: bounded by the sum of what each becomes."""
_SAMPLES, _REQUESTS, _RATIOS = "samples.jsonl", "requests.jsonl", "age.jsonl"


def start_mesh(suspend: str, **environment: str) -> Thaw:
    """Two nodes: one holds the pinned model and one other, the second one more.

    The caller closes it.

    Args:
        suspend: THAW_SUSPEND; `off`: every swap stops one engine and starts another.
        environment: further settings.
    """
    mesh = Thaw(THAW_SUSPEND=suspend, **environment)
    try:
        specs = [
            ModelSpec(name=name, source=str(make_demo_model(mesh.home / "models" / name, "test", seed=seed)))
            for seed, name in enumerate((STEADY, *COMPETING))
        ]
        adapter = write_adapter(mesh.home / "models" / ADAPTER, Path(specs[0].source))
        one = need_of(card_of(specs[0])).total
        config = mesh.home / "thaw.yaml"
        models = [
            {"name": s.name, "source": s.source, **({"pin": True, "adapters": {ADAPTER: str(adapter)}} if s.name == STEADY else {})}
            for s in specs
        ]
        nodes = {"node-0": {"cpu:0": one * 5 // 2}, "node-1": {"cpu:0": one * 3 // 2}}
        document = {"mesh": {"port": mesh.port, "nodes": nodes}, "defaults": {"keep_alive": -1}, "models": models}
        config.write_text(json.dumps(document))
        mesh.json("up", "--detach", "--config", str(config))
    except BaseException:
        mesh.close()
        raise
    return mesh


def load_of(mesh: Thaw, rate: float, on_end: Callable[[SentRequest], None], deck: tuple[str, ...] = DECK) -> Load:
    return Load(mesh.url, steady=STEADY, adapter=f"{STEADY}:{ADAPTER}", competing=COMPETING, rate=rate, on_end=on_end, deck=deck)


class Traces:
    """Finds which requests were cold, from the mesh's own traces, a page at a time."""

    def __init__(self, mesh: Thaw) -> None:
        self._api = Api.from_home(Home(mesh.home))
        self._next = 1

    def read(self) -> dict[str, bool]:
        """Return the traces written since the last call, by request id."""
        found: dict[str, bool] = {}
        while True:
            page = self._api.request("GET", f"/admin/v1/traces?from={self._next}&limit=500")
            found |= {t["request_id"]: bool(t.get("cold")) for t in page["traces"]}
            if page["next"] is None or not page["traces"]:
                return found
            self._next = int(page["next"])


class Run:
    """One soak: load and censuses at the same time, written at once."""

    def __init__(self, mesh: Thaw, directory: Path, rate: float) -> None:
        self._counter = Counter(mesh, (STEADY,))
        self._traces = Traces(mesh)
        self._directory = directory
        self._waiting: list[SentRequest] = []
        self._cold: dict[str, bool] = {}
        self._load = load_of(mesh, rate, self._waiting.append)
        self._began = time.monotonic()

    async def run(self, seconds: float) -> None:
        interval = min(30.0, max(_LEAST_INTERVAL_S, seconds / 200))
        sampling = asyncio.create_task(self._sample(interval), name="census")
        try:
            await self._load.run(seconds)
        finally:
            sampling.cancel()
            await asyncio.gather(sampling, return_exceptions=True)
        await asyncio.sleep(1)  # the last traces are written off their requests' path
        await self._write(final=True)
        await self._load.close()
        await self._counter.close()

    async def _sample(self, interval: float) -> None:
        next_at = time.monotonic()
        while True:
            await asyncio.sleep(max(0.0, next_at - time.monotonic()))
            next_at += interval
            try:
                await self._write()
            except (
                CommandError,
                OSError,
            ) as e:  # a soak of hours is not ended by one census that failed: it says so, and the next may succeed
                print(f"a census failed: {e!r}", file=sys.stderr)

    async def _write(self, *, final: bool = False) -> None:
        census = await self._counter.count()
        census |= {f"load|{name}": float(n) for name, n in self._load.counts.items()}
        _append(self._directory / _SAMPLES, [stamp_census(census, self._began) | {"bounds": self._counter.bounds}])
        self._cold |= await asyncio.to_thread(self._traces.read)
        now = time.monotonic() - self._began
        done: list[SentRequest] = []
        waiting: list[SentRequest] = []
        for sent in self._waiting:
            # A trace is written off its request's path: it may appear at the next census.
            sent.cold = self._cold.pop(sent.request_id, None)
            is_late = now - sent.at_s - sent.duration_ms / 1e3 > _TRACED_WITHIN_S
            (done if sent.cold is not None or is_late or final else waiting).append(sent)
        self._waiting[:] = waiting
        _append(self._directory / _REQUESTS, [a.document() for a in done])


async def compare_with_new(mesh: Thaw, suspend: str, seconds: float) -> list[Ratio]:
    """Start a new mesh beside one that has served, and compare them; the new mesh is ended."""
    fresh = await asyncio.to_thread(start_mesh, suspend)
    try:
        loads = [load_of(m, 1.0, lambda _: None) for m in (mesh, fresh)]
        try:
            return ratios(await compare(loads[0], loads[1], seconds))
        finally:
            for load in loads:
                await load.close()
    finally:
        await asyncio.to_thread(fresh.close)


def _append(path: Path, documents: list[dict[str, Any]]) -> None:
    with path.open("a") as file:
        file.writelines(json.dumps(d) + "\n" for d in documents)


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@dataclass(frozen=True)
class Row:
    """One metric's slope per hour, judged."""

    name: str
    metric: str
    first: float
    last: float
    trend: Trend
    limit: float
    bound: float | None
    late: Trend | None = None
    """Trend of the second half alone: a cache, or a store near its bound, grows less there."""

    @property
    def month(self) -> float:
        """The expected value in a month, no more than the store's own bound."""
        grown = max(self.last, 0.0) + self.trend.slope * MONTH_H
        return min(grown, max(self.bound, self.last)) if self.bound is not None else grown

    @property
    def verdict(self) -> str:
        if not self.trend.rises:
            return "level"
        return "FILLS" if self.month > self.limit else "fits"


def rows_of(samples: list[dict[str, Any]], limits: dict[str, float]) -> list[Row]:
    """Return a row for each metric of at least nine tenths of the censuses.

    Censuses of the warm-up do not count.
    """
    end = samples[-1]["at_s"]
    kept = [s for s in samples if s["at_s"] >= end * WARM_UP]
    rows = []
    for key in sorted({k for s in kept for k in s["census"]}):
        name, _, metric = key.partition("|")
        points = [(s["at_s"] / 3600, s["census"][key]) for s in kept if key in s["census"]]
        if name in ("load", "machine") or metric == "cpu_s" or len(points) < max(LEAST_SAMPLES, 0.9 * len(kept)):
            continue
        times, values = zip(*points, strict=True)
        trend = theil_sen(times, values)
        bound = bound_of(name, metric, trend, samples[-1])
        half = len(points) // 2
        late = theil_sen(times[half:], values[half:]) if len(points) - half >= LEAST_SAMPLES else None
        rows.append(Row(name, metric, values[0], values[-1], trend, limit_of(name, metric, limits), bound, late))
    return [
        replace(r, bound=sum(p.month for p in rows if p.metric == r.metric and p.name != _ALL)) if r.name == _ALL else r
        for r in rows
    ]


def limits_here() -> dict[str, float]:
    """Return the limits of this machine."""
    return {
        "memory": float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")),
        "disk": float(shutil.disk_usage(tempfile.gettempdir()).free),
        "shm": float(shutil.disk_usage("/dev/shm").total),
        "fds": float(resource.getrlimit(resource.RLIMIT_NOFILE)[1]),
        "pids": float(Path("/proc/sys/kernel/pid_max").read_text()),
        "inodes": float(os.statvfs(tempfile.gettempdir()).f_favail),
    }


def limit_of(name: str, metric: str, limits: dict[str, float]) -> float:
    """Return the limit of a metric.

    Rows and messages have no limit of their own: their bytes have.
    """
    if metric in ("fds", "threads", "processes", "zombies"):
        return limits["fds" if metric == "fds" else "pids"]
    if name == "/dev/shm" and metric == "bytes":
        return limits["shm"]
    if metric.endswith("_bytes"):
        return limits["memory"]
    if metric.endswith("bytes"):
        return limits["disk"]
    if metric in ("files", "groups"):
        return limits["inodes"]
    return limits["pids"] if metric in ("connections", "consumers") else float("inf")


def bound_of(name: str, metric: str, trend: Trend, sample: dict[str, Any]) -> float | None:
    """Return the limit of a store, which the store itself never exceeds.

    A stream's limit is in its configuration (age by the slope); plans and logs have the product's
    own limits.
    """
    if name == "nats" and metric == "private_bytes":
        return float(NATS_MEMORY_BYTES)
    if name == "table public.plans" and metric == "rows":
        return float(TRACE_MAX_COUNT)
    if name.startswith("log of "):
        return float(LIMIT_BYTES)
    if name == "directory logs" and metric == "bytes":  # each log, and the older one that is kept of it
        return 2.0 * LIMIT_BYTES * len([key for key in sample["census"] if key.startswith("log of ")])
    if not name.startswith("stream ") or metric not in ("messages", "bytes"):
        return None
    census, limits = sample["census"], {k.partition("|")[2]: v for k, v in sample["bounds"].items() if k.startswith(f"{name}|")}
    each = 1.0 if metric == "messages" else census[f"{name}|bytes"] / max(1.0, census[f"{name}|messages"])
    bounds = [limits["max_messages"] * each] if "max_messages" in limits else []
    if "max_bytes" in limits:
        bounds.append(limits["max_bytes"] if metric == "bytes" else limits["max_bytes"] / max(1.0, each))
    if "max_age_s" in limits:
        bounds.append(max(census[f"{name}|{metric}"], trend.slope * limits["max_age_s"] / 3600))
    return min(bounds) if bounds else None


@dataclass(frozen=True)
class Tenth:
    """Time to first token of one tenth of the run, and the machine's load meanwhile."""

    name: str
    requests: int
    p50_ms: float
    p99_ms: float
    load_average: float


def tenths(samples: list[dict[str, Any]], requests: list[dict[str, Any]]) -> dict[str, list[Tenth]]:
    """The first tenth after the warm-up and the last one, of warm and of cold streams."""
    end = samples[-1]["at_s"]
    begin = end * WARM_UP
    width = (end - begin) / 10
    found: dict[str, list[Tenth]] = {"warm": [], "cold": []}
    for name, low, high in (("first tenth", begin, begin + width), ("last tenth", end - width, end)):
        load = [s["census"]["machine|load"] for s in samples if low <= s["at_s"] <= high]
        for temperature, is_cold in (("warm", False), ("cold", True)):
            ttft = [r["ttft_ms"] for r in requests if low <= r["at_s"] < high and r["cold"] is is_cold and r["ttft_ms"] is not None]
            found[temperature].append(
                Tenth(name, len(ttft), percentile(ttft, 50), percentile(ttft, 99), sum(load) / max(1, len(load)))
            )
    return found


def show(directory: Path, out: Console) -> dict[str, float]:
    """Print what the files in `directory` say by now; the figures."""
    samples, requests = _lines(directory / _SAMPLES), _lines(directory / _REQUESTS)
    hours = samples[-1]["at_s"] / 3600
    figures: dict[str, float] = {"hours": hours, "samples": len(samples), "requests": len(requests)}
    rows = rows_of(samples, limits_here())
    table = Table(title=f"{hours:.2f} hours, {len(samples)} censuses, the first {hours * 60 * WARM_UP:.0f} minutes left out")
    for heading in ("what", "metric", "first", "last", "per hour", "95 % interval", "second half", "in a month", "verdict"):
        table.add_column(heading, justify="left" if heading in ("what", "metric", "verdict") else "right")
    for row in rows:
        size = _size if row.metric.endswith("bytes") else _number
        t = row.trend
        late = "" if row.late is None else size(row.late.slope)
        table.add_row(
            row.name, row.metric, size(row.first), size(row.last), size(t.slope), f"{size(t.low)} to {size(t.high)}", late,
            size(row.month), row.verdict,
        )  # fmt: skip
        key = f"{row.name} {row.metric}"
        figures |= {f"{key} first": row.first, f"{key} last": row.last, f"{key} per hour": t.slope}
        figures |= {f"{key} low": t.low, f"{key} high": t.high}
        if row.late is not None:
            figures[f"{key} per hour, second half"] = row.late.slope
    out.print(table)
    _show_requests(samples, requests, figures, out)
    _show_ratios([Ratio(**line) for line in _lines(directory / _RATIOS)], figures, out)
    worst = [f"{r.name} {r.metric}" for r in rows if r.verdict == "FILLS"]
    figures["metrics that fill the machine in a month"] = len(worst)
    out.print(f"metrics that would fill the machine in a month: {', '.join(worst) or 'none'}")
    return figures


def _show_requests(samples: list[dict[str, Any]], requests: list[dict[str, Any]], figures: dict[str, float], out: Console) -> None:
    table = Table(title="time to first token of streams, ms; the machine was shared with other work: see the load average")
    for heading in ("", "tenth", "requests", "p50", "p99", "load average"):
        table.add_column(heading)
    for temperature, found in tenths(samples, requests).items():
        for tenth in found:
            table.add_row(
                temperature, tenth.name, str(tenth.requests), f"{tenth.p50_ms:.1f}", f"{tenth.p99_ms:.1f}", f"{tenth.load_average:.1f}",
            )  # fmt: skip
            if tenth.requests >= _LEAST_REQUESTS:
                key = f"{temperature} {tenth.name}"
                figures |= {f"{key} p50 ms": tenth.p50_ms, f"{key} p99 ms": tenth.p99_ms, f"{key} load average": tenth.load_average}
    out.print(table)
    lost = [r for r in requests if r["lost"]]
    cpu = [s["census"]["mesh|cpu_s"] for s in samples if "mesh|cpu_s" in s["census"]]
    figures |= {
        "requests lost": len(lost),
        "requests malformed and refused as they must be": sum(r["kind"] == MALFORMED and not r["lost"] for r in requests),
        "cold requests": sum(r["cold"] is True for r in requests),
        "answers that differ from the first to the same prompt": samples[-1]["census"].get("load|different", 0.0),
        "cores used by living processes": (cpu[-1] - cpu[0]) / max(1.0, samples[-1]["at_s"] - samples[0]["at_s"]),
    }
    for name in list(figures)[-5:]:
        out.print(f"{name}: {figures[name]:g}")
    for request in lost[:10]:
        out.print(f"  lost at {request['at_s']:.0f} s: {request['kind']} to {request['model']}: {request['lost']}", markup=False)


def _show_ratios(found: list[Ratio], figures: dict[str, float], out: Console) -> None:
    for ratio in found:
        key = f"time to first token, old mesh over new one, {ratio.name}"
        figures |= {key: ratio.value, f"{key} low": ratio.low, f"{key} high": ratio.high}
        out.print(
            f"{key}: {ratio.value:.2f} (95 % {ratio.low:.2f} to {ratio.high:.2f}; {ratio.old_ms:.1f} and {ratio.new_ms:.1f} ms; "
            f"{ratio.requests} pairs)"
        )


def _size(value: float) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(value) >= size:
            return f"{value / size:.1f} {unit}"
    return f"{value:.0f} B"


def _number(value: float) -> str:
    return f"{value:.0f}" if value == round(value) else f"{value:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.soak")
    parser.add_argument("--hours", type=float, default=2.0)
    parser.add_argument("--rate", type=float, default=1.0, help="requests a second")
    parser.add_argument(
        "--compare", type=float, default=0.0, metavar="MINUTES", help="at the end, compare with a new mesh for so long"
    )
    parser.add_argument("--suspend", choices=("auto", "off"), default="auto", help="off: every swap stops an engine and starts one")
    parser.add_argument("--directory", type=Path, help="where samples are kept")
    parser.add_argument("--report", type=Path, metavar="DIR", help="print what a run's samples say; start nothing")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    directory: Path = arguments.report or arguments.directory or Path(tempfile.mkdtemp(prefix="thaw-soak-"))
    if arguments.report is None:
        directory.mkdir(parents=True, exist_ok=True)
        print(f"samples in {directory}", file=sys.stderr)
        mesh = start_mesh(arguments.suspend)
        try:
            asyncio.run(Run(mesh, directory, arguments.rate).run(arguments.hours * 3600))
            if arguments.compare:
                found = asyncio.run(compare_with_new(mesh, arguments.suspend, arguments.compare * 60))
                _append(directory / _RATIOS, [asdict(r) for r in found])
        finally:
            mesh.close()
    write(arguments.json, show(directory, Console(width=180)))


if __name__ == "__main__":
    main()
