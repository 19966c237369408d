"""How many real models share four devices within their objectives (Torpor, section 7.3).

    python -m bench.density [--models 48] [--seconds 60] [--variants thaw,dedicated,...] [--slo 7]
        [--rounds 1] [--json PATH]

Models of 5 million parameters with different random weights; one node with four cpu devices that
have memory of their own, together for a quarter of the models. Each model gets 5 to 30 requests per
minute over HTTP at random times (Poisson), with a prompt of a few tokens and one token to generate.
A model complies if the 98th percentile of its latencies is within the objective: --slo times the
warm latency, which is measured at the beginning of the run on an idle mesh. The default is that of
the paper's fastest function, 80 ms to 11.

Each variant is a mesh of its own that gets the same requests, after each model has answered once:

    thaw        policy `thaw`, shared executors
    dedicated   policy `thaw`, a process for each instance
    torpor      policy `torpor`, shared executors
    lru         policy `lru`: least recently used eviction
    random      policy `simple-swap`: a random device, least recently used eviction
    native      policy `native`: models that fit stay, requests of the others wait in vain

Latencies count from the time at which a request is due. A request without a response within
--patience counts as late, and so does one that was refused. The models are made once and kept in
--cache. With fewer than 50 requests of a model its 98th percentile is its longest latency.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from bench.density_load import OK, Asking, Load, Outcome, ask_each, ask_in_turn, draw_arrivals, send
from bench.density_mesh import DEVICES, BenchMesh, Setup, cached_models, running_mesh
from bench.report import median, write
from shared.percentiles import percentile
from shared.sizing import MIB

VARIANTS = {
    "thaw": ("thaw", "shared"),
    "dedicated": ("thaw", "dedicated"),
    "torpor": ("torpor", "shared"),
    "lru": ("lru", "shared"),
    "random": ("simple-swap", "shared"),
    "native": ("native", "shared"),
}
"""Policy and isolation."""
PER_MINUTE = (5.0, 30.0)
PERCENTILE = 98
MULTIPLES = (2, 4, 7, 10, 20, 50)
"""Further objectives, in warm latencies, for which compliance is reported."""
_WARM_REQUESTS = 40
_WARM_UP_AT_ONCE = 8
_WARM_UP_WITHIN_S = 120.0
_SETTLE_S = 3.0


def rates_of(models: Sequence[str], seed: int) -> dict[str, float]:
    """Return requests per second by model, drawn evenly from Torpor's range."""
    draw = random.Random(seed)
    return {model: draw.uniform(*PER_MINUTE) / 60 for model in models}


def latencies(outcomes: Sequence[Outcome]) -> dict[str, list[float]]:
    """Return latencies by model; a failed request counts as infinitely late."""
    found: dict[str, list[float]] = defaultdict(list)
    for o in outcomes:
        found[o.model].append(o.latency_ms if o.status == OK else float("inf"))
    return found


def compliant(outcomes: Sequence[Outcome], slo_ms: float) -> int:
    """Return how many models have their 98th percentile within the objective."""
    return sum(percentile(found, PERCENTILE) <= slo_ms for found in latencies(outcomes).values())


def judge(load: Load, slo_ms: float, warm_ms: float) -> dict[str, float]:
    """Return the figures of the clients."""
    by_model = latencies(load.outcomes)
    tails = sorted(percentile(found, PERCENTILE) for found in by_model.values())
    answered = [o.latency_ms for o in load.outcomes if o.status == OK]
    figures = {
        "models": len(by_model),
        "requests": len(load.outcomes),
        "failed": sum(o.status != OK for o in load.outcomes),
        "models_that_comply": compliant(load.outcomes, slo_ms),
        "in_time_percent": 100 * sum(o.status == OK and o.latency_ms <= slo_ms for o in load.outcomes) / len(load.outcomes),
        "latency_p50_ms": percentile(answered, 50),
        "latency_p98_ms": percentile(answered, 98),
        "client_late_p98_ms": percentile(load.late_ms, 98),
        "client_cpu_s": load.cpu_s,
    }
    figures["comply_percent"] = 100 * figures["models_that_comply"] / len(by_model)
    for share in (10, 50, 90, 100):
        figures[f"model_p98_ms_of_{share}_percent"] = min(percentile(tails, share), 1e9)
    for multiple in MULTIPLES:
        figures[f"comply_percent_at_{multiple}_warm"] = 100 * compliant(load.outcomes, multiple * warm_ms) / len(by_model)
    return figures


def measure(mesh: BenchMesh, setup: Setup, options: argparse.Namespace, seed: int, warm_ms: float) -> dict[str, float]:
    """Send all requests to a mesh, and return its figures."""
    names = list(setup.models)
    at_once = len(names) if setup.policy == "native" else _WARM_UP_AT_ONCE
    began = time.perf_counter()
    asking = Asking(mesh.port, options.tokens, options.patience)
    statuses = asyncio.run(ask_each(replace(asking, patience_s=_WARM_UP_WITHIN_S), names, at_once))
    if OK not in statuses.values():
        raise SystemExit("no model has answered; `thaw explain` on a mesh with the same settings says why")
    warm_up_s = time.perf_counter() - began
    time.sleep(_SETTLE_S)
    arrivals = draw_arrivals(rates_of(names, seed), options.seconds, seed)
    cpu, starts, began = mesh.cpu_s(), mesh.count_starts(), time.perf_counter()
    load = asyncio.run(send(asking, arrivals))
    took_s = time.perf_counter() - began
    spent = {name: seconds - cpu.get(name, 0.0) for name, seconds in mesh.cpu_s().items()}
    swaps = mesh.count_starts() - starts
    assert isinstance(setup.slo_ms, float)
    figures = judge(load, setup.slo_ms, warm_ms)
    figures |= {"swaps_per_s": swaps / took_s, "swaps_percent_of_requests": 100 * swaps / len(arrivals), "warm_up_s": warm_up_s}
    figures |= {f"cpu_s.{name}": seconds for name, seconds in spent.items()}
    figures["cpu_cores"] = (sum(spent.values()) + load.cpu_s) / took_s
    figures["cpu_ms_per_request"] = 1e3 * sum(spent.values()) / len(arrivals)
    figures |= {f"memory_mib.{name}": nbytes / MIB for name, nbytes in mesh.memory_bytes().items()}
    return figures


def warm_latency(setup: Setup, tokens: int) -> float:
    """Return the median latency in milliseconds of models that are ready, one request at a time."""
    few = dict(list(setup.models.items())[: len(DEVICES)])
    with running_mesh(replace(setup, models=few, resident=len(few))) as mesh:
        names, asking = list(few), Asking(mesh.port, tokens, _WARM_UP_WITHIN_S)
        asyncio.run(ask_each(asking, names, len(names)))
        time.sleep(_SETTLE_S)
        return median(asyncio.run(ask_in_turn(asking, names * (_WARM_REQUESTS // len(names)))))


def run(options: argparse.Namespace) -> dict[str, float]:
    models = cached_models(options.models, options.cache)
    base = Setup(models, resident=max(1, options.models // 4 // len(DEVICES)), queue_s=options.patience)
    warm_ms = warm_latency(base, options.tokens)
    slo_ms = options.slo * warm_ms
    print(f"warm latency {warm_ms:.1f} ms, objective {slo_ms:.0f} ms", file=sys.stderr)
    found: dict[str, list[float]] = defaultdict(list)
    for number in range(options.rounds):
        turn = options.variants if number % 2 == 0 else options.variants[::-1]
        for variant in turn:
            policy, isolation = VARIANTS[variant]
            setup = replace(base, slo_ms=slo_ms, policy=policy, isolation=isolation)
            with running_mesh(setup) as mesh:
                figures = measure(mesh, setup, options, number, warm_ms)
            for name, value in figures.items():
                found[f"{variant}.{name}"].append(value)
            comply = f"{figures['models_that_comply']:.0f} of {options.models} comply"
            print(f"{variant}: {comply}, {figures['in_time_percent']:.1f} % in time", file=sys.stderr)
    result = {"warm_ms": warm_ms, "slo_ms": slo_ms, **{name: median(values) for name, values in found.items()}}
    native = result.get("native.models_that_comply")
    if native and "thaw.models_that_comply" in result:
        result["thaw_over_native_models"] = result["thaw.models_that_comply"] / native
    return result


def _variants(text: str) -> list[str]:
    names = text.split(",")
    if unknown := [n for n in names if n not in VARIANTS]:
        raise argparse.ArgumentTypeError(f"there is no variant {', '.join(unknown)}; there are {', '.join(VARIANTS)}")
    return names


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--models", type=int, default=48, help="a multiple of 16 fills the devices evenly")
    found.add_argument("--seconds", type=float, default=60.0, help="of requests to each variant")
    found.add_argument("--variants", type=_variants, default=list(VARIANTS), help="joined by commas")
    found.add_argument("--slo", type=float, default=80 / 11, help="objective in warm latencies")
    found.add_argument("--tokens", type=int, default=1, help="to generate by each request")
    found.add_argument("--patience", type=float, default=10.0, help="seconds that a request waits")
    found.add_argument("--rounds", type=int, default=1)
    found.add_argument("--cache", type=Path, default=Path(tempfile.gettempdir()) / "thaw-bench-models")
    found.add_argument("--json", type=Path)
    return found


def main() -> None:
    options = parser().parse_args()
    figures = run(options)
    for name, value in figures.items():
        print(f"{name:45} {value:12.2f}")
    write(options.json, figures)


if __name__ == "__main__":
    main()
