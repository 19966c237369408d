"""`python -m services.scheduler.simulation`: what `thaw simulate` runs. Prints one JSON document; a refusal is `{"error": …}` and status 1."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

from services.scheduler.domain.policies.profiles import profile_named
from services.scheduler.simulation.config import ClusterFile, ModelsFile, names_of, read
from services.scheduler.simulation.simulate import simulate as run
from services.scheduler.simulation.workloads.synthetic import Synthetic, read_trace, synthetic
from shared.errors import ThawError


def simulate(options: argparse.Namespace) -> dict[str, Any]:
    cluster, models = read(options.cluster, ClusterFile), read(options.models, ModelsFile)
    names = names_of(models.models)
    runs = []
    for seed in range(options.seeds):
        if options.trace is not None:
            requests = read_trace(options.trace, names)
        else:
            what = Synthetic(
                options.rps,
                options.duration,
                options.cv,
                options.zipf,
                options.prompt_tokens,
                options.output_tokens,
                options.length_cv,
            )
            requests = synthetic(what, names, seed)
        outcome = run(cluster, models.models, requests, profile_named("thaw"), seed)
        runs.append({"policy": "thaw", "seed": seed, **outcome.figures()})
        if options.trace is not None:
            break  # nothing is drawn: all seeds would be alike
    return {"runs": runs}


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m services.scheduler.simulation", description="Simulate a cluster.")
    made.add_argument("--cluster", type=Path, required=True)
    made.add_argument("--models", type=Path, required=True)
    made.add_argument("--trace", type=Path)
    made.add_argument("--seeds", type=int, default=1)
    made.add_argument("--duration", type=float, default=600.0)
    for name, default in (
        ("rps", 1.0),
        ("cv", 1.0),
        ("zipf", 1.0),
        ("prompt-tokens", 256.0),
        ("output-tokens", 128.0),
        ("length-cv", 0.0),
    ):
        made.add_argument(f"--{name}", type=float, default=default)
    return made


def main(arguments: list[str] | None = None) -> int:
    try:
        document, status = simulate(parser().parse_args(arguments)), os.EX_OK
    except ThawError as e:
        document, status = {"error": e.body().model_dump()}, 1
    sys.stdout.write(json.dumps(document) + "\n")
    return status


if __name__ == "__main__":
    sys.exit(main())
