"""Moving running streams: what their clients wait, and what it does to everybody else.

    python -m bench.migration [--contexts 64,256,1024,4096] [--rounds N] [--parts pause,throughput,policies] [--json PATH]

On a mesh of two nodes with the built-in engine (one machine: what a destination computes is missing from the source).

pause       one greedy stream with so many tokens of prompt. The pause is its longest gap between two tokens minus the median gap, as its client
            measures them; the total is from the order to its end. Three ways: rounds of tokens (`thaw migrate`); one go (the source stops, the
            destination recomputes everything); and a restart from the prompt (the stream is cancelled and asked again: the pause ends when the
            new one is as far as the old one was).
throughput  eight streams of one instance; tokens per second of seven of them before, and while the eighth moves.
policies    the scenario of ServerlessLLM's Fig. 3: model A runs on node-1, which has B's weights in DRAM; node-0 is free and has A's in DRAM,
            B's on disk. Now B is asked for. availability: B loads on node-0. locality: B waits on node-1 until A is done. preemption: A is
            interrupted and starts again on node-0. migration: the scheduler moves A's stream to node-0. Told are B's time to the first token, and
            what A lost: the longest pause of its stream.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from pydantic import SecretStr
from rich.console import Console
from rich.table import Table

from bench.report import spread, write
from shared.contracts import subjects
from shared.contracts.migration import FindRequest, MoveRequest, RequestFound, RequestMoved
from shared.messaging import Mesh
from shared.settings import CommonSettings
from tests.support.launcher import until
from tests.support.moving import Roomy, Stream

CONTEXT = 6144
BEFORE = 24
"""Tokens that a stream has said before it is moved."""
AFTER = 96
WAYS = ("rounds", "one go", "restart")
POLICIES = ("availability", "locality", "preemption", "migration")
Values = dict[str, list[float]]


def completion(model: str, prompt: int, tokens: int) -> dict[str, Any]:
    """Token ids: exactly so many, whatever the tokeniser."""
    ids = [3 + (i * 7919) % 1000 for i in range(prompt)]
    return {"model": model, "prompt": ids, "max_tokens": tokens, "temperature": 0, "logprobs": 0, "stop": [], "ignore_eos": True}


def begin(mesh: Roomy, model: str, prompt: int, tokens: int, said: int = BEFORE) -> Stream:
    """A stream that has come so far."""
    stream = Stream(mesh.url, completion(model, prompt, tokens)).start()
    until(lambda: len(stream.tokens) >= said or bool(stream.error), 120, "a stream runs")
    if stream.error:
        raise RuntimeError(stream.error)
    return stream


def paused_ms(stream: Stream, since: int) -> float:
    """The longest gap after `since` tokens, above the median."""
    gaps = stream.gaps[since:]
    return (max(gaps) - median(gaps)) * 1e3


def other(node: str) -> str:
    return "node-1" if node == "node-0" else "node-0"


def target(mesh: Roomy, model: str) -> tuple[str, str, str]:
    """The serving instance, and another one with its node."""
    source, node = mesh.place(model)
    (instance,) = mesh.on(model, other(node))
    return source, instance, other(node)


def in_one_go(mesh: Roomy, stream: Stream, source: str, instance: str) -> float:
    """The gateway is told at once, with nothing prepared. Seconds until the first token came from there."""

    async def move() -> float:
        url = json.loads((mesh.home / "run" / "endpoints.json").read_text())["nats_url"]
        nats = Mesh(CommonSettings(nats_url=SecretStr(url)), "bench")
        await nats.start()
        try:
            found = await nats.request(subjects.FIND_REQUEST, FindRequest(request_id=stream.request_id), RequestFound)
            order = MoveRequest(
                deadline_ms=60_000,
                request_id=f"{found.request_id}-1",
                migration_id="bench",
                token=1,
                source_instance=source,
                instance_id=instance,
            )
            began = time.monotonic()
            await nats.request(subjects.gateway_control(found.gateway_id), order, RequestMoved)
            return time.monotonic() - began
        finally:
            await nats.stop()

    return asyncio.run(move())


def pauses(mesh: Roomy, contexts: list[int], rounds: int, figures: Values) -> None:
    """Part 1."""
    mesh.everywhere("one")
    for context in contexts:
        for way in WAYS * rounds:
            stream = begin(mesh, "one", context, BEFORE + AFTER)
            source, instance, node = target(mesh, "one")
            said, began = len(stream.tokens), time.monotonic()
            key = f"{way}.{context}"
            if way == "rounds":
                (record,) = mesh.order(request_id=stream.request_id, node=node)["migrations"]
                if record["state"] != "done":
                    print(f"{key}: {record['state']} {record['error']}")
                    stream.result()
                    continue
                figures[f"{key}.total_ms"].append((time.monotonic() - began) * 1e3)
                figures[f"{key}.rounds"].append(len(record["rounds"]))
                figures[f"{key}.gateway_pause_ms"].append(record["requests"][0]["pause_ms"])
            elif way == "one go":
                figures[f"{key}.total_ms"].append(in_one_go(mesh, stream, source, instance) * 1e3)
            if way == "restart":
                stream.leave()
                began = time.monotonic()
                again = begin(mesh, "one", context, said + 8, said)
                figures[f"{key}.pause_ms"].append((time.monotonic() - began - median(stream.gaps[3:])) * 1e3)
                again.result()
            else:
                stream.result()
                figures[f"{key}.pause_ms"].append(paused_ms(stream, max(3, said - 2)))
            figures[f"{key}.token_ms"].append(median(stream.gaps[3:]) * 1e3)


def throughput(mesh: Roomy, rounds: int, figures: Values) -> None:
    """Part 2."""
    mesh.everywhere("one")
    node = "node-0"
    for _ in range(rounds):
        streams = [Stream(mesh.url, completion("one", 512, 2000)).start() for _ in range(8)]
        until(partial(_all_run, streams), 120, "eight streams run")
        for stream in streams:  # all on one instance
            mesh.gather(stream.request_id, node)
        until(lambda: len(serving(mesh)) == 1, 60, "one instance serves")
        moving, rest = streams[0], streams[1:]
        count = _counter(rest)
        _, before = count(lambda: time.sleep(2.0))
        (record,), during = count(partial(_move, mesh, moving, other(node)))
        _, after = count(lambda: time.sleep(2.0))
        if record["state"] == "done":
            figures["throughput.before"].append(before)
            figures["throughput.during"].append(during)
            figures["throughput.lost_percent"].append(100 * (1 - during / before))
            figures["throughput.after"].append(after)
        for stream in streams:
            stream.leave()
        for stream in streams:
            stream.result()
        mesh.await_settled()


def _all_run(streams: list[Stream]) -> bool:
    return all(len(s.tokens) > 4 for s in streams)


def _move(mesh: Roomy, stream: Stream, node: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = mesh.order(request_id=stream.request_id, node=node)["migrations"]
    return found


def serving(mesh: Roomy) -> list[str]:
    return [i["instance_id"] for n in mesh.json("ps")["nodes"] for i in n["instances"] if i["load"]["active"]]


def _counter(streams: list[Stream]) -> Callable[[Callable[[], Any]], tuple[Any, float]]:
    """Tokens per second of the streams while something is done."""

    def count(doing: Callable[[], Any]) -> tuple[Any, float]:
        began, said = time.monotonic(), sum(len(s.tokens) for s in streams)
        done = doing()
        return done, (sum(len(s.tokens) for s in streams) - said) / (time.monotonic() - began)

    return count


class Scenario:
    """Part 3. One device holds one instance."""

    def __init__(self, mesh: Roomy, tokens: int) -> None:
        self.mesh, self.tokens = mesh, tokens

    def confine(self, model: str, *devices: str) -> None:
        self.mesh.change(model, placement={"devices": list(devices)})

    def prepare(self) -> Stream:
        """A's weights in DRAM on node-0, B's on node-1, and A running there."""
        for model, node in (("a", "node-0"), ("b", "node-1")):
            self.confine(model, f"{node}/*")
            self.mesh.json("wake", model)
            self.mesh.json("sleep", model)
        self.confine("a", "node-1/*")
        self.mesh.json("wake", "a")
        self.confine("a")
        return begin(self.mesh, "a", 256, self.tokens)

    def run(self, policy: str, figures: Values) -> None:
        running = self.prepare()
        self.confine("b", "node-0/*" if policy == "availability" else "node-1/*")
        # A pinned instance is left alone; of one that is not the scheduler moves the stream, by its own decision.
        if policy != "migration":
            self.mesh.change("a", pin=True)
        said, began = len(running.tokens), time.monotonic()
        asked = Stream(self.mesh.url, completion("b", 64, 4)).start()
        lost = 0.0
        if policy == "preemption":
            running.leave()
            self.mesh.change("a", pin=False, placement={"devices": ["node-0/*"]})
            self.mesh.json("sleep", "a")
            again = begin(self.mesh, "a", 256, said + 8, said)
            lost = (time.monotonic() - began) * 1e3
            again.result()
        if policy == "locality":
            running.result()
            self.mesh.change("a", pin=False)
        asked.result()
        if asked.error:
            raise RuntimeError(asked.error)
        figures[f"{policy}.b_ttft_ms"].append((asked.first - asked.began) * 1e3)
        running.result()
        if policy != "preemption":
            lost = paused_ms(running, said)
        figures[f"{policy}.a_pause_ms"].append(lost)
        self.mesh.change("a", pin=False)
        for model in ("a", "b"):
            self.mesh.json("sleep", model)


def policies(mesh: Roomy, rounds: int, figures: Values) -> None:
    scenario = Scenario(mesh, 400)
    for policy in POLICIES * rounds:
        scenario.run(policy, figures)


def one_mesh(contexts: list[int], rounds: int, parts: set[str], figures: Values) -> None:
    if parts & {"pause", "throughput"}:
        mesh = Roomy()
        try:
            mesh.begin(2, size="5m", room=1.5, positions=CONTEXT, max_model_len=CONTEXT, max_concurrency=10)
            mesh.json("wake", "one")
            if "pause" in parts:
                pauses(mesh, contexts, rounds, figures)
            if "throughput" in parts:
                throughput(mesh, rounds, figures)
        finally:
            mesh.close()
    if "policies" in parts:
        mesh = Roomy(THAW_DRAM_BYTES=str(2 << 30))
        try:
            mesh.begin(2, size="60m", names=("a", "b"), room=1.5, max_model_len=2048, max_concurrency=4)
            policies(mesh, rounds, figures)
        finally:
            mesh.close()


def tables(contexts: list[int], figures: Values) -> list[Table]:
    shown = []
    if any(f"rounds.{c}.pause_ms" in figures for c in contexts):
        table = Table(
            "context", "token ms", *(f"{w}: pause ms" for w in WAYS), "rounds: total ms", "rounds", title="Moving one stream"
        )
        for c in contexts:
            cells = [spread(v) if (v := figures.get(f"{w}.{c}.pause_ms")) else "-" for w in WAYS]
            totals, count, token = (figures.get(f"rounds.{c}.{k}") or [0.0] for k in ("total_ms", "rounds", "token_ms"))
            table.add_row(str(c), f"{median(token):.1f}", *cells, spread(totals), f"{median(count):.0f}")
        shown.append(table)
    if "throughput.before" in figures:
        table = Table("before", "while one moves", "after", "lost %", title="Tokens per second of seven other streams")
        table.add_row(*(spread(figures[f"throughput.{k}"]) for k in ("before", "during", "after", "lost_percent")))
        shown.append(table)
    if any(f"{p}.b_ttft_ms" in figures for p in POLICIES):
        table = Table("policy", "B: first token ms", "A: pause ms", title="ServerlessLLM's Fig. 3 on two nodes")
        for p in POLICIES:
            table.add_row(p, spread(figures[f"{p}.b_ttft_ms"]), spread(figures[f"{p}.a_pause_ms"]))
        shown.append(table)
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contexts", default="64,256,1024,4096")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--parts", default="pause,throughput,policies")
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    contexts = [int(c) for c in options.contexts.split(",")]
    figures: Values = defaultdict(list)
    threading.stack_size(512 * 1024)
    one_mesh(contexts, options.rounds, set(options.parts.split(",")), figures)
    for table in tables(contexts, figures):
        Console(width=130).print(table)
    write(options.json, {f"{name}.p50": median(values) for name, values in figures.items()} | _ends(figures))


def _ends(figures: Values) -> dict[str, float]:
    return {f"{name}.{end}": pick(values) for name, values in figures.items() for end, pick in (("least", min), ("most", max))}


if __name__ == "__main__":
    main()
