"""Run the papers' experiments in the simulator, and print each paper's figures and statements
beside ours.

python -m bench.papers                      all of them, 10 seeds (hours: Torpor's are large)
python -m bench.papers serverlessllm-fig8 --seeds 5
python -m bench.papers --quick --json out   three seeds of shorter runs; a JSON file per experiment
python -m bench.papers --constants          what the papers state, and what they omit
"""

from __future__ import annotations

import argparse
import time
from importlib import import_module
from pathlib import Path

from bench.papers.constants import Constant
from bench.papers.core import Options, format_result, summary, write

EXPERIMENTS = (
    *(f"serverlessllm_fig{n}" for n in (8, 9, 10, 11, 12)),
    *(f"torpor_fig{n}" for n in (10, 11, 14, 16)),
    *(f"tangram_fig{n}" for n in (8, 10, 12, 13)),
    *(f"hydraserve_fig{n}" for n in (7, 8, 9, 10, 12, 13, 14)),
    "thaw_beside",
)
PAPERS = ("serverlessllm", "torpor", "tangram", "hydraserve")


def constants() -> str:
    lines = ["| paper | constant | value | stated | source |", "| --- | --- | --- | --- | --- |"]
    for paper in PAPERS:
        for name, value in vars(import_module(f"bench.papers.constants.{paper}")).items():
            if isinstance(value, Constant):
                stated = "yes" if value.stated else "no"
                lines.append(f"| {paper} | {name.lower()} | {value.value:g} {value.unit} | {stated} | {value.source} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.papers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [e.replace("_", "-") for e in EXPERIMENTS]
    parser.add_argument("experiments", nargs="*", metavar="EXPERIMENT", help=f"any of {', '.join(names)}; none: all")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--scale", type=float, default=1.0, help="of the length of each run")
    parser.add_argument("--quick", action="store_true", help="three seeds of runs a quarter as long, no sensitivity")
    parser.add_argument("--no-sensitivity", action="store_true", help="leave out the runs with constants at ±50 %%")
    parser.add_argument("--only", default="", metavar="TEXT", help="of thaw-beside: the settings that have this in their names")
    parser.add_argument("--json", type=Path, metavar="DIR", help="write one file for each experiment")
    parser.add_argument("--constants", action="store_true", help="print the constants and where they come from")
    parser.add_argument(
        "--summary", type=Path, metavar="DIR", help="print one table of the statements in such files, and run nothing"
    )
    args = parser.parse_args()
    if args.summary is not None:
        print(summary(args.summary))
        return
    if args.constants:
        print(constants())
        return
    if unknown := set(args.experiments) - set(names):
        parser.error(f"no experiment {min(unknown)!r}; there are {', '.join(names)}")
    options = (
        Options(3, 0.25, False, args.only) if args.quick else Options(args.seeds, args.scale, not args.no_sensitivity, args.only)
    )
    for name in args.experiments or names:
        began = time.perf_counter()
        result = import_module(f"bench.papers.{name.replace('-', '_')}").run(options)
        print(format_result(result))
        print(
            f"{name}: {time.perf_counter() - began:.0f} s, {options.seeds} seeds, runs {options.scale:g} times as long as stated\n",
            flush=True,
        )
        if args.json is not None:
            settings = {"seeds": options.seeds, "scale": options.scale, "sensitivity": options.sensitivity}
            write([result], args.json, settings)


if __name__ == "__main__":
    main()
