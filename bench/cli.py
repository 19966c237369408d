"""How long the command line takes to answer: `python -m bench.cli [--runs N] [--json FILE]`.

CPU and wall time of whole processes, `thaw --help` and `thaw ps` against a mesh without models. CPU
time is what imports cost; wall time adds the mesh's answer and whatever else the machine does.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

from bench.own_mesh import own_mesh
from bench.report import median, spread, write

_COMMANDS = {"help": ("--help",), "ps": ("ps",), "ps_json": ("ps", "--json")}


def measure(arguments: tuple[str, ...], environment: dict[str, str], runs: int) -> tuple[list[float], list[float]]:
    """Return CPU and wall milliseconds of each of `runs` processes."""
    cpu, wall = [], []
    for _ in range(runs):
        before, begun = os.times(), time.perf_counter()
        subprocess.run([sys.executable, "-m", "thaw", *arguments], env=environment, check=True, stdout=subprocess.DEVNULL)
        after = os.times()
        wall.append((time.perf_counter() - begun) * 1e3)
        cpu.append((after.children_user + after.children_system - before.children_user - before.children_system) * 1e3)
    return cpu, wall


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=21, help="processes of each command")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    figures: dict[str, float] = {}
    with own_mesh() as environment:
        for name, arguments in _COMMANDS.items():
            measure(arguments, environment, 2)  # the files enter the page cache
            cpu, wall = measure(arguments, environment, options.runs)
            print(f"thaw {' '.join(arguments):10} CPU {spread(cpu)} ms, wall {spread(wall)} ms", flush=True)
            figures |= {f"{name}_cpu_ms": median(cpu), f"{name}_wall_ms": median(wall)}
    write(options.json, figures)


if __name__ == "__main__":
    main()
