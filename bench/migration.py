"""Moving running streams: the pauses of their clients, and the cost for other streams.

    python -m bench.migration [--contexts 64,256,1024,4096] [--rounds N]
        [--parts pause,throughput,policies] [--json PATH [--add]]

The meshes have two nodes with the built-in engine on one machine. The processes of each node have a
core of their own, and each engine has one thread.

pause       One greedy stream (5M model) with a prompt of --contexts tokens. The pause is its
            longest gap between two tokens less the median gap, as its client measures them; the
            total is the time from the order to the end of the migration. Three ways: rounds of
            tokens (`thaw migrate`); one round (the source stops, the destination recomputes
            everything); and a restart from the prompt (the client cancels the stream and repeats
            the request: the pause ends when the new stream has as many tokens as the old one had).
            NATS, scheduler, gateway, migrator and clients run on both cores.
throughput  Eight streams of one instance on node-0 (60M model). Tokens per second, as clients
            receive them, of seven of them: in the two seconds before the eighth moves to node-1,
            and during its migration. Then the same with four streams running at the destination.
            Both are measured with keys and values that the destination recomputes, and with
            transfers where they are predicted to be faster, as by default. All other processes and
            all clients run on node-1's core.
policies    The scenario of ServerlessLLM's Fig. 3: model A (60M) runs on node-1, which has B's
            weights (250M) in host memory; node-0 is free, has A's in host memory and B's only at a
            slow source. Then a request for B arrives. availability: B loads on node-0. locality: B
            waits on node-1 until A is done. preemption: A is preempted and starts again on node-0.
            migration: the scheduler decides, and moves A's stream. The output has the latency of
            both requests (from arrival to the last token), the time to the first token of B, and
            the longest pause of A.
"""

from __future__ import annotations

import argparse
import threading
from collections import defaultdict
from itertools import product
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

from bench.migration_policies import POLICIES, policies
from bench.migration_streams import BYTES, WAYS, pauses, throughput
from bench.moving import Values
from bench.report import spread, write

PARTS = ("pause", "throughput", "policies")


def pause_table(contexts: list[int], figures: Values) -> Table:
    table = Table("context", "token ms", *(f"{w}: pause ms" for w in WAYS), "rounds: total ms", "rounds", title="Moving one stream")
    for c in contexts:
        pause = [_spread(figures.get(f"{w}.{c}.pause_ms")) for w in WAYS]
        totals, count, token = (figures.get(f"rounds.{c}.{k}") for k in ("total_ms", "rounds", "token_ms"))
        table.add_row(str(c), _spread(token), *pause, _spread(totals), _spread(count))
    return table


def _spread(values: list[float] | None) -> str:
    return spread(values) if values else "-"


def throughput_table(figures: Values) -> Table:
    columns = ("keys and values", "destination", "whose", "before", "while one moves", "lost %", "window ms")
    table = Table(*columns, title="Tokens per second")
    for case, who in product(("alone", "beside"), ("others", "all", "destination")):
        for way in BYTES:
            key = f"throughput.{way}.{case}"
            values = [figures.get(f"{key}.{who}.{k}", []) for k in ("before", "during", "lost_percent")]
            if all(values):
                place = "idle" if case == "alone" else "serves four"
                table.add_row(way, place, who, *map(spread, values), spread(figures[f"{key}.window_ms"]))
    return table


def policies_table(figures: Values) -> Table:
    columns = ("b_latency_ms", "a_latency_ms", "b_ttft_ms", "a_pause_ms")
    names = ("B: latency ms", "A: latency ms", "B: first token ms", "A: pause ms")
    table = Table("policy", *names, title="ServerlessLLM's Fig. 3 on two nodes")
    measured = [p for p in POLICIES if figures.get(f"{p}.b_ttft_ms")]
    best = {c: min(median(figures[f"{p}.{c}"]) for p in measured) for c in columns[:2]}
    for p in measured:
        cells = [spread(figures[f"{p}.{c}"]) for c in columns]
        for i, c in enumerate(columns[:2]):
            cells[i] += f" +{100 * (median(figures[f'{p}.{c}']) / best[c] - 1):.0f} %"
        table.add_row(p, *cells)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contexts", default="64,256,1024,4096")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--add", action="store_true", help="keep the figures of other parts in the file")
    options = parser.parse_args()
    contexts, parts = [int(c) for c in options.contexts.split(",")], set(options.parts.split(","))
    if unknown := parts - set(PARTS):
        parser.error(f"there are no parts {', '.join(sorted(unknown))}")
    figures: Values = defaultdict(list)
    threading.stack_size(512 * 1024)
    shown = Console(width=150)
    if "pause" in parts:
        pauses(contexts, options.rounds, figures)
        shown.print(pause_table(contexts, figures))
    if "throughput" in parts:
        throughput(options.rounds, figures)
        shown.print(throughput_table(figures))
    if "policies" in parts:
        policies(options.rounds, figures)
        shown.print(policies_table(figures))
    write(
        options.json,
        {f"{name}.p50": median(values) for name, values in figures.items()} | _extremes(figures),
        add=options.add,
    )


def _extremes(figures: Values) -> dict[str, float]:
    return {f"{name}.{end}": pick(values) for name, values in figures.items() for end, pick in (("least", min), ("most", max))}


if __name__ == "__main__":
    main()
