"""Pipeline groups: time to first token by stages, time per token, and the pauses of moves.

    python -m bench.pipeline [--size 60m] [--pace-mib 20] [--stages 1,2,4] [--rounds N]
        [--parts start,consolidation,migration,burst,tpot] [--kv auto] [--prompt 32]
        [--json PATH [--add]]

A mesh of real processes on this machine: as many nodes as the largest group has stages, and one
beside. Every loader has one connection to a web server that sends `--pace-mib` MiB/s on each. So
each node's link is paced, and the nodes' links do not share. Nothing is kept in host memory, on
disk or taken from peers: every start fetches.

start          one request to a cold model, by its stages: the time to its first token, and the
               median time between further ones. Beside it fetch-then-start: the time to download
               the files on one paced connection, plus a cold start of the same model from disk; and
               the simulator's time to first token, with what was measured with one worker.
consolidation  a model with an objective that one node misses: the scheduler takes two nodes, and
               makes one instance of them while a client reads. The gap is the longest time between
               two of its tokens from the start of the migration to its end. Reported beside the
               time per token before and after, and that of one engine with as long a context; the
               JSON also has the tokens whose keys and values the stages sent, and those recomputed.
migration      a stream moves between two groups of two stages, there and back. Reported: the
               pause at the gateway, the duration, and the tokens whose keys and values were sent
               or that were recomputed. `--kv never` gives the same moves, with all recomputed.

burst          eight requests at once to a cold model with an objective that one node misses; each
               instance runs two at a time, and four nodes can have stages. In turn: two groups of
               two stages, which become two instances (`groups`); one group, which becomes one
               (`one_group`, `replicas.max` 1); and without an objective two instances of one worker
               each (`workers`). Reported: the mean time to the first token, and until all have
               ended. It runs only if `--parts` names it.
tpot           one engine and a group of each number of stages are up at once, and decode the same
               prompt in turn, `--rounds` times. Reported: the time per token, and its ratio to
               that of the engine in the same round (`bench.pipeline_tpot`). It runs only if
               `--parts` names it.

All processes share the cores of this machine: stages of a group do not compute on hardware of
their own, as they would on several machines.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from statistics import mean, median

import httpx
from rich.console import Console
from rich.table import Table

from bench.moving import Bed, Timed, Values, await_tokens, completion, order
from bench.pipeline_replay import OneWorker, simulate_ttft_s
from bench.pipeline_tpot import SETTLED, SINGLE, add_ratios, goal_lines, measure_tpot, tpot_ms, tpot_table
from bench.report import spread, write
from bench.slow_source import slow_source
from shared.contracts.models import ModelSpec
from shared.contracts.phases import measure_covered
from shared.contracts.stages import split_layers
from shared.sizing import MIB, need_of
from tests.support.launcher import until
from tests.support.moving import is_later_stage
from thaw.cli.demo import card_of
from thaw.demo.models import make_demo_model
from weights.formats.checkpoint import open_checkpoint
from weights.formats.stages import layer_sizes

PARTS = ("start", "consolidation", "migration", "burst", "tpot")
BESIDE = "beside"
PROMPT = 32
TOKENS = 64
"""Tokens of a request in `start`; the first `SETTLED` are no sample of the time per token."""
CONTEXT = 8192
READS = 7000
"""Tokens that the client of `consolidation` reads at most."""
AFTER = 200
"""Tokens after the migration, before the client leaves."""
GROUPS, STAGES = 2, 2
"""Groups and stages of `migration` and `burst`."""
BURST, BURST_TOKENS = 8, 48
"""Requests of `burst`, and the tokens of each."""
BETWEEN = 20
"""Tokens before each move of `migration`."""
OPTIONS = {"max_concurrency": 2, "max_model_len": CONTEXT}
GOAL_TTFT, GOAL_TPOT, GOAL_GAP_MS = 0.35, 1.2, 100.0
"""Goals: the TTFT at s = 4 by that of one worker, the TPOT of a group by that of one engine, and
the longest gap in milliseconds, to which twice the TPOT is added.
"""


class Groups(Bed):
    """The mesh, with a model for each number of stages."""

    def __init__(self, kv: str) -> None:
        """Create the mesh.

        Args:
            kv: THAW_MIGRATE_KV.
        """
        super().__init__(
            THAW_MIGRATE_KV=kv,
            THAW_PEERS="false",
            THAW_CACHE_BYTES="0",
            THAW_PREFETCH="false",
            THAW_DRAM_BYTES="0",
            THAW_LOADER_REMOTE_THREADS="1",
        )

    def raise_up(self, url: str, directory: Path, stages: list[int], nodes: int) -> None:
        card = card_of(ModelSpec(name="one", source=str(directory), **OPTIONS))
        room = 2 * need_of(card).total + 64 * MIB
        self.nodes = [f"node-{n}" for n in range(nodes)]
        far = {"source": f"{url}/m", "placement": {"devices": ["node-*/*"]}}
        document = {
            "mesh": {"port": self.port, "nodes": {n: {"cpu:0": room} for n in (*self.nodes, BESIDE)}},
            "defaults": {"keep_alive": -1, **OPTIONS},
            "models": [
                *({"name": f"s{s}", **far, "stages": s} for s in stages),
                *({"name": f"probe-{n}", **far, "placement": {"devices": [f"{n}/*"]}} for n in self.nodes),
                {"name": "local", "source": str(directory), "placement": {"devices": [f"{BESIDE}/*"]}},
                {"name": "far", **far, "slo": {"ttft": 0.001}},
                {
                    "name": "groups",
                    **far,
                    "stages": STAGES,
                    "replicas": {"min": 0, "max": GROUPS},
                    "placement": {"devices": ["node-*/*"], "spread": True},
                },
            ],
        }
        path = self.home / "thaw.yaml"
        path.write_text(json.dumps(document))
        self.json("up", "--detach", "--config", str(path))

    def first_stages(self, model: str) -> dict[str, str]:
        """Return the node of each ready instance of the model; of a group its first stage's."""
        return {
            i["instance_id"]: n["node"]
            for n in self.cluster()["nodes"]
            for i in n["instances"]
            if i["model"] == model and i["state"] == "ready" and not is_later_stage(i)
        }

    def starting(self) -> set[str]:
        """Return the models with an instance that starts."""
        found = [i for n in self.cluster()["nodes"] for i in n["instances"]]
        return {i["model"] for i in found if i["state"] in ("preparing", "loading")}

    def measure_links(self) -> None:
        """Let each node fetch once, so that the scheduler knows its link."""
        for node in self.nodes:
            self.json("wake", f"probe-{node}")
            self.json("sleep", f"probe-{node}")


def start(mesh: Groups, url: str, directory: Path, stages: list[int], rounds: int, figures: Values) -> None:
    """Part 1, the numbers of stages in turn."""
    for _ in range(rounds):
        for s in stages:
            _ask(mesh, f"s{s}", f"s{s}", figures)
        began = time.monotonic()
        download(f"{url}/m", directory)
        fetched_ms = (time.monotonic() - began) * 1e3
        _ask(mesh, "local", "local", figures)
        figures["then_start.ttft_ms"].append(fetched_ms + figures["local.ttft_ms"][-1])


def _ask(mesh: Groups, model: str, key: str, figures: Values, prompt: int = PROMPT) -> None:
    stream = Timed(mesh.url, completion(model, prompt, TOKENS)).start()
    stream.result()
    if stream.error:
        raise RuntimeError(stream.error)
    figures[f"{key}.ttft_ms"].append((stream.first - stream.began) * 1e3)
    figures[f"{key}.tpot_ms"].append(tpot_ms(stream.at[SETTLED:]))  # type: ignore[attr-defined]  # a Timed
    figures[f"{key}.fetch_ms"].append(fetch_ms(mesh, stream.request_id))
    mesh.json("sleep", model)
    mesh.await_settled()


def fetch_ms(mesh: Groups, request_id: str) -> float:
    """Return the milliseconds of a request's start in which weights were loaded."""
    spans = mesh.json("trace", request_id)["request"]["spans"]
    return measure_covered([(s["start_ms"], s["start_ms"] + s["duration_ms"]) for s in spans if s["phase"] in ("fetch", "load")])


def simulate_starts(stages: list[int], directory: Path, figures: Values) -> None:
    """Add the simulator's TTFT for each number of stages, if one worker was measured."""
    if "s1.ttft_ms" not in figures:
        return
    fetched, ttft, each = (median(figures[f"s1.{name}"]) / 1e3 for name in ("fetch_ms", "ttft_ms", "tpot_ms"))
    tensors = [t for file in open_checkpoint(directory).files for t in file.header.tensors]
    weights, sizes = sum(t.nbytes for t in tensors), layer_sizes(tensors, 0)
    assert sizes is not None
    shares = {s: max(map(sizes.bytes_of, split_layers(sizes.count, s))) / weights for s in stages if s > 1}
    for s in stages:
        took = simulate_ttft_s(s, OneWorker(weights, fetched, ttft, each, shares), PROMPT, TOKENS)
        figures[f"s{s}.simulated_ttft_ms"].append(took * 1e3)


def download(url: str, directory: Path) -> None:
    """Read all files of a model on one connection, as before a start from disk."""
    with httpx.Client(trust_env=False, timeout=600) as client:
        for path in sorted(directory.iterdir()):
            with client.stream("GET", f"{url}/{path.name}") as answer:
                answer.raise_for_status()
                for _ in answer.iter_bytes():
                    pass


def predicted_ms(mesh: Groups) -> dict[int, float]:
    """Return the soonest start of `far` by number of stages, when two nodes can have a group.

    A node whose loader still has the weights of the last part gets none.
    """
    found: dict[int, float] = {}

    def is_possible() -> bool:
        candidates = mesh.json("explain", "far", "--what-if", f"drop-node={BESIDE}")["candidates"]
        found.clear()
        for c in candidates:
            if c["predicted_ms"]:
                found[c["stages"]] = min(c["predicted_ms"], found.get(c["stages"], c["predicted_ms"]))
        return {1, 2} <= set(found)

    until(is_possible, 120, "a group of two nodes is possible")
    return found


def consolidation(mesh: Groups, rounds: int, figures: Values, prompt: int) -> None:
    """Part 2. The client's prompt has `prompt` tokens."""
    predicted = predicted_ms(mesh)
    mesh.change("far", slo={"ttft": (predicted[1] + predicted[2]) / 2e3})
    for _ in range(rounds):
        before = set(mesh.records())
        stream = Timed(mesh.url, completion("far", prompt, READS))
        stream.start()
        await_tokens(stream, SETTLED)
        found: list[float] = []

        def is_ordered(known: set[str] = before, times: list[float] = found) -> bool:
            if new := [r for key, r in mesh.records().items() if key not in known]:
                times.append(time.monotonic() - (new[0].duration_ms or 0.0) / 1e3)
            return bool(new)

        until(is_ordered, 120, "the migration of the group is ordered")
        until(lambda known=before: all(r.over for k, r in mesh.records().items() if k not in known), 120, "it is over")  # type: ignore[misc]
        await_tokens(stream, len(stream.tokens) + AFTER)
        stream.leave()
        stream.result()
        [record] = [r for key, r in mesh.records().items() if key not in before]
        if record.state != "done":
            print(f"a consolidation is {record.state}: {record.error}", flush=True)
            figures["consolidation.not_done"].append(1.0)
        else:
            _note(stream, found[0], record.requests[0].tokens, record.requests[0].pause_ms or 0.0, figures)
            figures["consolidation.kv_tokens"].append(sum(r.kv_tokens for r in record.rounds))
            figures["consolidation.kv_bytes"].append(sum(r.kv_bytes for r in record.rounds))
            figures["consolidation.recomputed_tokens"].append(sum(r.tokens for r in record.rounds))
        mesh.json("sleep", "far")
        mesh.await_settled()
        if record.state == "done":
            # One engine, with a context as long as the group's stream had after its consolidation.
            _ask(mesh, "local", "local_now", figures, prompt + int(figures["consolidation.tokens"][-1]) + AFTER // 2)


def _note(stream: Timed, began: float, moved_at: int, gateway_ms: float, figures: Values) -> None:
    """Record one run.

    Args:
        stream: Its client.
        began: When the migration was ordered.
        moved_at: Tokens that the group had generated.
        gateway_ms: The pause as the gateway measured it.
    """
    first = next((n for n, t in enumerate(stream.at) if t >= began), moved_at)
    during = stream.at[max(0, min(first, moved_at) - 1) : moved_at + AFTER // 2]
    figures["consolidation.gap_ms"].append(max(b - a for a, b in pairwise(during)) * 1e3)
    figures["consolidation.gateway_pause_ms"].append(gateway_ms)
    figures["consolidation.tokens"].append(moved_at)
    figures["consolidation.before_ms"].append(tpot_ms(stream.at[SETTLED : max(SETTLED + 2, min(first, moved_at))]))
    figures["consolidation.after_ms"].append(tpot_ms(stream.at[moved_at + AFTER // 2 :]))


def migration(mesh: Groups, rounds: int, figures: Values, prompt: int) -> None:
    """Part 3: a stream with a prompt of `prompt` tokens moves there and back, `rounds` times."""
    mesh.change("groups", replicas={"min": GROUPS, "max": GROUPS})
    until(lambda: len(mesh.first_stages("groups")) == GROUPS, 240, "two groups are ready")
    stream = Timed(mesh.url, completion("groups", prompt, READS))
    stream.start()
    await_tokens(stream, 1)
    here, _ = mesh.place("groups", serving=True)
    for _ in range(2 * rounds):
        await_tokens(stream, len(stream.tokens) + BETWEEN)
        there = next(node for instance, node in mesh.first_stages("groups").items() if instance != here)
        if (record := order(mesh, stream, there)) is None:
            figures["migration.not_done"].append(1.0)
            continue
        here = record["instance_id"]
        figures["migration.pause_ms"].append(record["requests"][0]["pause_ms"])
        figures["migration.duration_ms"].append(record["duration_ms"])
        for name, field in (("kv_tokens", "kv_tokens"), ("kv_bytes", "kv_bytes"), ("recomputed_tokens", "tokens")):
            figures[f"migration.{name}"].append(sum(r[field] for r in record["rounds"]))
    stream.leave()
    stream.result()
    mesh.change("groups", replicas={"min": 0, "max": GROUPS})
    mesh.json("sleep", "groups")
    mesh.await_settled()


def is_cold(mesh: Groups, model: str) -> bool:
    """True if every start of one worker of the model would fetch its weights."""
    candidates = mesh.json("explain", model, "--what-if", f"drop-node={BESIDE}")["candidates"]
    alone = [c for c in candidates if c["predicted_ms"] and c["stages"] == 1]
    return len(alone) == len(mesh.nodes) and all(c["source"] == "remote" for c in alone)


def burst(mesh: Groups, rounds: int, figures: Values) -> None:
    """Part 4, the three ways in turn."""
    predicted = predicted_ms(mesh)
    # Nearer to what one worker takes, because requests have waited when the second group is placed.
    objective = {"ttft": (0.2 * predicted[2] + 0.8 * predicted[1]) / 1e3}
    several, one = {"min": 0, "max": GROUPS}, {"min": 0, "max": 1}
    ways = {"groups": (objective, several), "one_group": (objective, one), "workers": ({}, several)}
    for _ in range(rounds):
        for name, (slo, replicas) in ways.items():
            mesh.change("far", slo=slo, replicas=replicas)
            until(lambda: is_cold(mesh, "far"), 120, "no node has weights of the last instances")
            streams = [Timed(mesh.url, completion("far", PROMPT + n, BURST_TOKENS)) for n in range(BURST)]
            for stream in streams:
                stream.start()
            for stream in streams:
                stream.result()
                if stream.error:
                    raise RuntimeError(stream.error)
            began = min(s.began for s in streams)
            figures[f"burst.{name}.ttft_ms"].append(mean((s.first - s.began) * 1e3 for s in streams))
            figures[f"burst.{name}.ended_ms"].append((max(s.ended for s in streams) - began) * 1e3)
            until(lambda: "far" not in mesh.starting(), 120, "no instance of the model starts")
            mesh.json("sleep", "far")
            mesh.await_settled()


def start_table(stages: list[int], figures: Values) -> Table:
    columns = ("start", "first token ms", "by one worker", "simulated ms", "error", "ms per token", "by one engine")
    table = Table(*columns, title="Cold starts of one request")
    for key in (*(f"s{s}" for s in stages), "then_start"):
        ttft, each = figures[f"{key}.ttft_ms"], figures.get(f"{key}.tpot_ms")
        row = [spread(ttft), _ratio(ttft, figures["s1.ttft_ms"]) if "s1.ttft_ms" in figures else "-"]
        if simulated := figures.get(f"{key}.simulated_ttft_ms"):
            row += [f"{simulated[0]:.0f}", f"{simulated[0] / median(ttft) - 1:+.0%}"]
        else:
            row += ["-", "-"]
        row += [f"{median(each):.2f}", _ratio(each, figures["s1.tpot_ms"])] if each and "s1.tpot_ms" in figures else ["-", "-"]
        table.add_row(key if key != "then_start" else "fetch, then start", *row)
    return table


def _ratio(values: list[float], base: list[float]) -> str:
    return f"{median(values) / median(base):.2f}"


def goals(figures: Values) -> list[str]:
    """Return a line for each goal of the issue that was measured."""
    lines = []
    if figures.get("s4.ttft_ms") and figures.get("s1.ttft_ms"):
        ratio = median(figures["s4.ttft_ms"]) / median(figures["s1.ttft_ms"])
        lines.append(f"first token of 4 stages by one worker: {ratio:.2f} (goal: at most {GOAL_TTFT})")
    for s in (2, 4):
        if figures.get(f"s{s}.tpot_ms") and figures.get("s1.tpot_ms"):
            ratio = median(figures[f"s{s}.tpot_ms"]) / median(figures["s1.tpot_ms"])
            lines.append(f"time per token of {s} stages by one engine: {ratio:.2f} (goal: at most {GOAL_TPOT})")
    lines += goal_lines(figures, GOAL_TPOT)
    if gaps := figures.get("consolidation.gap_ms"):
        limit = GOAL_GAP_MS + 2 * median(figures["consolidation.before_ms"])
        lines.append(f"longest gap of consolidation: {spread(gaps)} ms (goal: at most {limit:.0f} ms)")
        after = median(figures["consolidation.after_ms"]) / median(figures["consolidation.before_ms"])
        line = f"time per token after consolidation by before: {after:.2f}"
        if alone := figures.get("local_now.tpot_ms"):
            line += f", and by one engine at that context: {median(figures['consolidation.after_ms']) / median(alone):.2f}"
        lines.append(line)
    if several := figures.get("burst.groups.ttft_ms"):
        for name in ("one_group", "workers"):
            other = figures[f"burst.{name}.ttft_ms"]
            line = f"burst: mean first token of {name} {spread(other)} ms, of two groups {spread(several)} ms"
            lines.append(f"{line}: {median(other) / median(several):.2f} times as long")
    if pauses := figures.get("migration.pause_ms"):
        lines.append(
            f"move between two groups: pause {spread(pauses)} ms, duration {spread(figures['migration.duration_ms'])} ms, "
            f"{median(figures['migration.kv_tokens']):.0f} tokens sent, {median(figures['migration.recomputed_tokens']):.0f} recomputed"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="60m")
    parser.add_argument("--pace-mib", type=float, default=20.0)
    parser.add_argument("--stages", default="1,2,4")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--parts", default=",".join(PARTS[:3]))
    parser.add_argument("--kv", default="auto", choices=("auto", "always", "never"), help="THAW_MIGRATE_KV of the migrators.")
    parser.add_argument(
        "--prompt", type=int, default=PROMPT, help="Tokens of the prompt in `consolidation`, `migration` and `tpot`."
    )
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--add", action="store_true", help="Keep what the file has of other parts.")
    options = parser.parse_args()
    stages, parts = [int(s) for s in options.stages.split(",")], set(options.parts.split(","))
    if unknown := parts - set(PARTS):
        parser.error(f"there are no parts {', '.join(sorted(unknown))}")
    figures: Values = defaultdict(list)
    mesh, shown = Groups(options.kv), Console(width=130)
    try:
        directory = make_demo_model(mesh.home / "models" / "m", options.size)
        config = json.loads((directory / "config.json").read_text())
        (directory / "config.json").write_text(json.dumps({**config, "max_position_embeddings": CONTEXT}))
        with slow_source(directory.parent, int(options.pace_mib * MIB)) as url:
            mesh.raise_up(url, directory, stages, max(2, *stages, GROUPS * STAGES if parts & {"migration", "burst"} else 0))
            mesh.measure_links()
            if "start" in parts:
                start(mesh, url, directory, stages, options.rounds, figures)
                simulate_starts(stages, directory, figures)
                shown.print(start_table(stages, figures))
            if "consolidation" in parts:
                consolidation(mesh, options.rounds, figures, options.prompt)
            if "migration" in parts:
                migration(mesh, options.rounds, figures, options.prompt)
            if "burst" in parts:
                burst(mesh, options.rounds, figures)
            if "tpot" in parts:
                groups = {f"{s} stages": f"s{s}" for s in stages if s > 1}
                measure_tpot(mesh, {SINGLE: "local", **groups}, options.rounds, options.prompt, figures)
                add_ratios(figures)
                shown.print(tpot_table(figures))
    finally:
        mesh.close()
    for line in goals(figures):
        print(line)
    medians = {f"{name}.p50": median(values) for name, values in figures.items()}
    write(options.json, medians | {"pace_mib": options.pace_mib}, add=options.add)


if __name__ == "__main__":
    main()
