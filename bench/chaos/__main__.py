"""Strike a mesh under load with random faults, and print what its clients saw.

    python -m bench.chaos --kills 500 --seed 1 [--clients 6] [--seconds S] [--json PATH] [--keep]

`--kills` counts processes struck: killed (SIGKILL), stopped for 15 s (SIGSTOP), or killed two at
once. Two gateways behind a balancer (TCP, round robin, in this process), two schedulers, two nodes;
llama.cpp where `make engines` has installed it. The plan of faults and each client's requests are
functions of the seed; their timing is not. Ends with status 1 if a request was lost, broken,
truncated, wrong or generated twice, if memory was booked twice, if the ledger of usage differs from
what the clients received, or if anything is left behind.
Columns: bench/chaos/verdict.py; recovery is until a warm and a cold model have answered requests
sent at the fault, and killed services run again.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from bench.chaos.bed import Bed
from bench.chaos.campaign import Campaign, Findings, Say, say
from bench.chaos.faults import Fault, plan
from bench.chaos.results import figures, summary, table
from bench.report import write
from tests.support.reaping import tie_to_this_process


def campaign(
    faults: tuple[Fault, ...],
    seed: int,
    clients: int,
    say: Say,
    seconds: float | None = None,
    keep: Path | None = None,
    bed: Bed | None = None,
) -> Findings:
    """Bring a mesh up, carry the plan out, shut the mesh down.

    Args:
        seconds: no fault begins after so long.
        keep: a directory that gets the mesh's logs.
        bed: the mesh, which has not started.
    """
    bed = bed or Bed()
    try:
        say(f"state directory {bed.home}")
        bed.begin()
        under_way = Campaign(bed, seed, clients, say)
        findings = under_way.run(faults, seconds)
        if keep is not None:
            bed.copy_logs(keep)
        under_way.close_bed()
        return findings
    finally:
        bed.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--clients", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=None)
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--keep", type=Path, default=None, metavar="DIRECTORY", help="gets the logs of the mesh")
    options = parser.parse_args()
    tie_to_this_process()
    findings = campaign(plan(options.kills, options.seed), options.seed, options.clients, say, options.seconds, options.keep)
    print(table(findings))
    print(summary(findings))
    failures = findings.failures()
    for failure in failures:
        print(failure)
    write(options.json, figures(findings))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
