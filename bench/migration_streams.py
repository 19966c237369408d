"""Run parts 1 and 2 of the migration benchmark.

They measure the pause by context, and the cost of a move for other streams.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median

from bench.cores import pin, unpin
from bench.moving import NODES, Bed, Timed, Values, await_tokens, begin, completion, get_other_node, in_one_go, order, paused_ms

CONTEXT = 6144
BEFORE = 24
"""Tokens that a stream has generated before it is moved."""
AFTER = 32
"""… and after it."""
WAYS = ("rounds", "one go", "restart")
STREAMS, PROMPT, SAYS = 8, 512, 1500
"""Streams of part 2 on node-0, tokens of their prompts, and most tokens of their responses."""
KV_BYTES = 14_080
"""Keys and values of a token of the 60M model."""
BYTES = {"recomputed": "never", "transferred": "auto"}
"""THAW_MIGRATE_KV in part 2: the destination recomputes keys and values, or receives them."""
BESIDE = 4
"""… and streams on node-1, where one of those moves to."""
WINDOW_S = 2.0


def pauses(contexts: Sequence[int], rounds: int, figures: Values) -> None:
    """Part 1."""
    mesh = Bed()
    try:
        mesh.begin(2, size="5m", room=1.5, positions=CONTEXT, max_model_len=CONTEXT, max_concurrency=10)
        pin(mesh.processes(), {NODES[0]: {0}, NODES[1]: {1}}, {0, 1})
        mesh.json("wake", "one")
        mesh.everywhere("one")
        for context in contexts:
            for way in WAYS * rounds:
                _measure_one(mesh, context, way, figures)
    finally:
        unpin()
        mesh.close()


def _measure_one(mesh: Bed, context: int, way: str, figures: Values) -> None:
    stream = begin(mesh, "one", context, CONTEXT - context, BEFORE)
    source, node = mesh.place("one")
    (instance,) = mesh.on("one", get_other_node(node))
    key, generated, began = f"{way}.{context}", len(stream.tokens), time.monotonic()
    if way == "rounds":
        record = order(mesh, stream, get_other_node(node))
        if record is None:
            figures[f"{key}.not_done"].append(1.0)
            stream.leave()
            stream.result()
            return
        figures[f"{key}.total_ms"].append((time.monotonic() - began) * 1e3)
        figures[f"{key}.duration_ms"].append(record["duration_ms"])
        figures[f"{key}.rounds"].append(len(record["rounds"]))
        figures[f"{key}.gateway_pause_ms"].append(record["requests"][0]["pause_ms"])
    elif way == "one go":
        figures[f"{key}.total_ms"].append(in_one_go(mesh, stream, source, instance) * 1e3)
    if way == "restart":
        stream.leave()
        began = time.monotonic()
        again = begin(mesh, "one", context, generated + AFTER, generated)
        figures[f"{key}.pause_ms"].append((time.monotonic() - began - median(stream.gaps[3:])) * 1e3)
        again.result()
    else:
        await_tokens(stream, len(stream.tokens) + AFTER)
        figures[f"{key}.pause_ms"].append(paused_ms(stream, max(3, generated - 2)))
        stream.leave()
    stream.result()
    figures[f"{key}.token_ms"].append(median(stream.gaps[3:]) * 1e3)
    mesh.await_settled()


def throughput(rounds: int, figures: Values) -> None:
    """Part 2: each way in two meshes, which take turns."""
    for way in tuple(BYTES) * 2:
        _throughput(way, rounds, figures)


def _throughput(way: str, rounds: int, figures: Values) -> None:
    mesh = Bed(THAW_MIGRATE_KV=BYTES[way])
    try:
        kv = {"kv_cache_bytes": (STREAMS + BESIDE) * 2048 * KV_BYTES}
        mesh.begin(2, size="60m", room=1.5, max_model_len=2048, max_concurrency=STREAMS + BESIDE, engine_args=kv)
        pin(mesh.processes(), {NODES[0]: {0}, NODES[1]: {1}}, {1})
        mesh.change("one", placement={"devices": [f"{NODES[0]}/*"]})
        mesh.json("wake", "one")
        mine = _streams(mesh, STREAMS)
        mesh.change("one", placement={})
        mesh.everywhere("one")
        _moves(mesh, f"{way}.alone", mine, [], rounds, figures)
        beside = _streams(mesh, BESIDE)
        for stream in beside:
            mesh.gather(stream.request_id, NODES[1])
        _moves(mesh, f"{way}.beside", mine, beside, rounds, figures)
        for stream in (*mine, *beside):
            stream.leave()
        for stream in (*mine, *beside):
            stream.result()
    finally:
        unpin()
        mesh.close()


def _streams(mesh: Bed, count: int) -> list[Timed]:
    streams = [Timed(mesh.url, completion("one", PROMPT, SAYS)) for _ in range(count)]
    for stream in streams:
        stream.start()
    for stream in streams:
        await_tokens(stream, 5)
    return streams


def _moves(mesh: Bed, case: str, here: list[Timed], there: list[Timed], rounds: int, figures: Values) -> None:
    """Move one of the streams `here` to node-1, where those `there` run, and back.

    Only the first move is measured.
    """
    moving, rest = here[0], here[1:]
    for _ in range(rounds):
        time.sleep(1.0)  # what the move back has left is over
        began = time.monotonic()
        time.sleep(WINDOW_S)
        before = (began, began + WINDOW_S)
        record = order(mesh, moving, NODES[1])
        ended = time.monotonic()
        if record is None:
            figures[f"throughput.{case}.not_done"].append(1.0)
            continue
        during = (ended - record["duration_ms"] / 1e3, ended)
        await_tokens(moving, len(moving.tokens) + 4)
        for who, streams in (("others", rest), ("all", here), ("destination", there)):
            if streams:
                a, b = rate(streams, *before), rate(streams, *during)
                figures[f"throughput.{case}.{who}.before"].append(a)
                figures[f"throughput.{case}.{who}.during"].append(b)
                figures[f"throughput.{case}.{who}.lost_percent"].append(100 * (1 - b / a))
        figures[f"throughput.{case}.window_ms"].append(record["duration_ms"])
        figures[f"throughput.{case}.moved_tokens"].append(sum(r["tokens"] for r in record["rounds"]))
        order(mesh, moving, NODES[0])


def rate(streams: Sequence[Timed], since: float, until_: float) -> float:
    """Tokens per second of all of them together."""
    return sum(s.tokens_by(until_) - s.tokens_by(since) for s in streams) / (until_ - since)
