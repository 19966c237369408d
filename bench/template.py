"""The first token of a model that never ran, from a suspended engine of its template key and from
cold, by turns on one mesh with real vLLM: `python -m bench.template [--rounds N] [--json PATH]`.

A first model starts cold and is suspended: its engine is the template. Each round asks two models
with the same files that never ran, one of the template's key, and one with another
`max_concurrency`, which starts cold. Their texts have to be equal. Afterwards the first is
suspended, and is the template of the next round; the other is removed. TTFT is what a client
measures: request sent → first text received. vLLM runs from the environment that THAW_VLLM_PYTHON
names. Needs swap (`thaw doctor`).
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.hot_swap import MIB, Figures, SwapMesh
from bench.report import median, spread, write
from thaw.demo.models import make_demo_model

MEMORY = 3500 * MIB
BUDGET = 8000 * MIB
"""Room for two that run, and for what suspended ones leave in use."""
SOME_TOKENS = 16
CONCURRENCY = 16
CASES = ("template", "cold")


def model_of(name: str, source: Path, concurrency: int) -> dict[str, Any]:
    options = {"engine": "vllm", "engine_args": {"load_format": "thaw"}, "dtype": "float32", "memory": MEMORY}
    return {"name": name, "source": str(source), "max_concurrency": concurrency, **options}


def measure(mesh: SwapMesh, figures: Figures, rounds: int) -> None:
    """Ask each round's models, in changing order.

    Raises:
        RuntimeError: A model started another way, or two texts differ.
    """
    figures.add("base", "cold_ttft_ms", mesh.ask("base")[0])
    mesh.thaw("sleep", "base")
    for number in range(rounds):
        texts: dict[str, str] = {}
        for case in CASES[:: 1 if number % 2 else -1]:
            name = f"{case}-{number}"
            figures.add(case, "ttft_ms", mesh.ask(name)[0])
            plan = mesh.thaw("explain", name)
            if (plan["way"] == "template") is not (case == "template"):
                raise RuntimeError(f"{name} started by {plan['way']}: {plan['reason']}")
            texts[case] = mesh.ask(name, SOME_TOKENS)[2]
            if case == "template":
                mesh.thaw("sleep", name)
            else:
                mesh.thaw("models", "rm", name)
        if texts["template"] != texts["cold"]:
            raise RuntimeError(f"round {number}: the changed engine answers otherwise than a fresh one")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--size", default="60m", help="Of the demo models.")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if "THAW_VLLM_PYTHON" not in os.environ:
        print("THAW_VLLM_PYTHON does not name an environment with vLLM", file=sys.stderr)
        return 2
    figures = Figures()
    with tempfile.TemporaryDirectory(prefix="thaw-bench-") as directory:
        root = Path(directory)
        models = [model_of("base", make_demo_model(root / "base", options.size), CONCURRENCY)]
        for number in range(options.rounds):
            source = make_demo_model(root / f"m{number}", options.size, seed=number + 1)
            models.append(model_of(f"template-{number}", source, CONCURRENCY))
            models.append(model_of(f"cold-{number}", source, CONCURRENCY + 1 + number))
        mesh = SwapMesh(root / "home", models, "cpu:0", BUDGET, suspend=True)
        try:
            measure(mesh, figures, options.rounds)
        finally:
            mesh.close()
    table = Table("a model that never ran", "TTFT, ms: median (least to most)")
    for case in CASES:
        table.add_row(case, spread(figures.get_values(case, "ttft_ms")))
    Console().print(table)
    found = {f"{case}.ttft_ms": median(figures.get_values(case, "ttft_ms")) for case in CASES}
    found["speedup"] = found["cold.ttft_ms"] / found["template.ttft_ms"]
    print(f"speedup {found['speedup']:.1f}")
    write(options.json, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
