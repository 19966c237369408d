"""Cold starts of real vLLM with an interpreter in waiting and without, by turns on one mesh:
`python -m bench.spare [--rounds N] [--json PATH]`.

Both are the same model; one of them has an environment of its own, which an interpreter in waiting
is not taken for. Before each start one waits with its imports done. TTFT is what a client measures:
request sent → first text received. vLLM runs from the environment that THAW_VLLM_PYTHON names.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table

from bench.hot_swap import BUDGET, MEMORY, MIB, Figures, SwapMesh
from bench.report import median, spread, write
from thaw.demo.models import make_demo_model

CASES = {"waiting": {}, "anew": {"THAW_BENCH": "1"}}
_WITHIN_S = 300.0
_IDLE_BEFORE_PREPARE_S = 2.0


def idle_spare() -> psutil.Process:
    """The interpreter in waiting, when it has nothing left to import."""
    deadline = time.monotonic() + _WITHIN_S
    while time.monotonic() < deadline:
        found = [p for p in psutil.process_iter(["cmdline"]) if any(a.endswith("preload.py") for a in p.info["cmdline"] or ())]
        for process in found:
            before = process.cpu_times().user
            time.sleep(_IDLE_BEFORE_PREPARE_S)
            if before > 1.0 and process.is_running() and process.cpu_times().user == before:
                return process
        time.sleep(_IDLE_BEFORE_PREPARE_S)
    raise RuntimeError(f"no interpreter waits after {_WITHIN_S:g} s: see spares.log")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if "THAW_VLLM_PYTHON" not in os.environ:
        print("THAW_VLLM_PYTHON does not name an environment with vLLM", file=sys.stderr)
        return 2
    os.environ["THAW_SPARE_ENGINES"] = "vllm"
    figures = Figures()
    with tempfile.TemporaryDirectory(prefix="thaw-bench-") as directory:
        root = Path(directory)
        source = make_demo_model(root / "model", "5m")
        models = [
            {"name": name, "source": str(source), "engine": "vllm", "memory": MEMORY["cpu"]["vllm"], "env": env}
            for name, env in CASES.items()
        ]
        mesh = SwapMesh(root / "home", models, "cpu:0", BUDGET["cpu"], suspend=False)
        try:
            for number in range(options.rounds):
                for name in list(CASES)[:: 1 if number % 2 else -1]:
                    spare = idle_spare()
                    figures.add("spare", "pss_mib", spare.memory_full_info().pss / MIB)
                    figures.add(name, "cold_ttft_ms", mesh.ask(name)[0])
                    mesh.thaw("sleep", name)
        finally:
            mesh.close()
    table = Table("vLLM from cold", "TTFT, ms: median (least to most)")
    for name in CASES:
        table.add_row(name, spread(figures.get_values(name, "cold_ttft_ms")))
    Console().print(table)
    found = {f"{name}.cold_ttft_ms": median(figures.get_values(name, "cold_ttft_ms")) for name in CASES}
    found["speedup"] = found["anew.cold_ttft_ms"] / found["waiting.cold_ttft_ms"]
    found["spare_pss_mib"] = median(figures.get_values("spare", "pss_mib"))
    print(f"speedup {found['speedup']:.2f}, an interpreter in waiting holds {found['spare_pss_mib']:.0f} MiB")
    write(options.json, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
