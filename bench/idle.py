"""Measure the cost of a mesh without requests: `python -m bench.idle [--seconds N] [--json FILE]`.

Starts a mesh without models, lets it settle, and reads the CPU time of each of its processes from
/proc: percent of one core, children included.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

from bench.own_mesh import own_mesh
from bench.report import write
from thaw.launcher.identity import Identity
from thaw.launcher.processes import descendants

_SETTLE_S = 20.0
_TICKS = os.sysconf("SC_CLK_TCK")


def cpu_s(process: Identity, *, alone: bool) -> float:
    """CPU seconds of a process, with its living descendants unless `alone`."""
    total = 0
    for each in (process, *([] if alone else descendants(process))):
        try:
            fields = Path(f"/proc/{each.pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        total += int(fields[11]) + int(fields[12])
    return total / _TICKS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="how long it is measured")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    with own_mesh() as environment:
        status = json.loads((Path(environment["THAW_HOME"]) / "run" / "supervisor.json").read_text())
        processes = {name: Identity(**service["process"]) for name, service in status["services"].items()}
        processes["supervisor"] = Identity(**status["supervisor"])
        time.sleep(_SETTLE_S)
        before = {name: cpu_s(process, alone=name == "supervisor") for name, process in processes.items()}
        begun = time.monotonic()
        time.sleep(options.seconds)
        took = time.monotonic() - begun
        spent = {name: cpu_s(process, alone=name == "supervisor") - before[name] for name, process in processes.items()}
        share = {name: 100 * seconds / took for name, seconds in spent.items()}
    for name, percent in sorted(share.items(), key=lambda item: -item[1]):
        print(f"{name:20} {percent:5.2f} % of one core")
    print(f"{'sum':20} {sum(share.values()):5.2f} %")
    write(options.json, {f"{name}_percent": percent for name, percent in share.items()} | {"sum_percent": sum(share.values())})


if __name__ == "__main__":
    main()
