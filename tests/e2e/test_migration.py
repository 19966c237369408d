"""Streams on a mesh of three nodes survive random migrations token for token."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.support.launcher import until
from tests.support.mesh import kill
from tests.support.moving import ChatStream, Roomy, Stream, body
from tests.support.otlp import OtlpReceiver
from tests.support.paced_zygote import Pace
from tests.support.sizes import size

MOVES = int(os.environ.get("THAW_TEST_MIGRATIONS", "8"))
"""`make test-long` sets a thousand."""
STREAMS = 6
TOKENS, STEP_S = size(150, 300), 0.3
"""Tokens and step of streams that last until they have migrated: engines are slow until then."""
LOAD_STEP_S = size(0.06, 0.03)
"""Streams of some ten seconds, which are migrated at random."""


@pytest.fixture(scope="module")
def receiver() -> Iterator[OtlpReceiver]:
    receiver = OtlpReceiver()
    yield receiver
    receiver.close()


@pytest.fixture(scope="module")
def mesh(receiver: OtlpReceiver, pace: Pace) -> Iterator[Roomy]:
    """Three nodes whose migrations transfer keys and values, even where computing is sooner."""
    thaw = Roomy(
        THAW_OTLP_ENDPOINT=receiver.grpc_url,
        OTEL_BSP_SCHEDULE_DELAY="200",
        THAW_MIGRATE_KV="always",
        **pace.environment,
    )
    thaw.keep_port("THAW_MIGRATOR_METRICS_PORT")
    try:
        thaw.begin(3, room=1.5, positions=4096, max_model_len=2560, max_concurrency=8)
        thaw.json("wake", "one")
        yield thaw
    finally:
        thaw.close()


@pytest.fixture(scope="module")
def undisturbed(mesh: Roomy) -> list[Stream]:
    """Return the response to each body without migrations."""
    return [s.result() for s in [Stream(mesh.url, each).start() for each in BODIES]]


BODIES: list[dict[str, Any]] = [
    body("one", max_tokens=TOKENS),
    body("one", seed=7, max_tokens=TOKENS),
    body("one", seed=8, max_tokens=TOKENS, n=2),
    body("one", seed=9, max_tokens=TOKENS, frequency_penalty=0.5, presence_penalty=0.2),
    body("one", seed=10, max_tokens=TOKENS, prompt="né 日本 café"),
    body("one", seed=11, max_tokens=TOKENS * 2 // 3),
]
CITIES: dict[str, Any] = {"type": "array", "items": {"enum": ["Bern", "Rome", "Oslo"]}, "minItems": 20, "maxItems": 20}
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"cities": CITIES}, "required": ["cities"], "additionalProperties": False}
FORMAT: dict[str, Any] = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "travel", "parameters": SCHEMA}}
LONG = body("one", max_tokens=size(250, 500), ignore_eos=True)
"""A single stream that is still running when the migrator gets its order, on a busy machine too:
engines are slow until then.
"""


@pytest.fixture(scope="module")
def long(mesh: Roomy) -> Stream:
    """Return the response to LONG without migrations."""
    return Stream(mesh.url, LONG).start().result()


def test_migrated_stream_equals_the_undisturbed_one(mesh: Roomy, pace: Pace, long: Stream) -> None:
    with pace.slowed(STEP_S):
        stream = Stream(mesh.url, LONG).start()
        assert stream.opened.wait(120)
        answer = mesh.move_away(stream.request_id)
    stream.result().assert_same(long)
    (record,) = answer["migrations"]
    assert record["state"] == "done"
    (moved,) = record["requests"]
    assert moved["outcome"] == "moved"
    assert moved["pause_ms"] > 0
    document = mesh.json("trace", stream.request_id)
    assert [m["migration_id"] for m in document["migrations"]] == [record["migration_id"]]


def test_a_migration_is_shown_by_every_command(mesh: Roomy, pace: Pace, receiver: OtlpReceiver, long: Stream) -> None:
    """A migration appears in traces, `thaw trace`, `thaw ps` and metrics.

    Its own trace holds its rounds, and is linked with the request's trace in both directions.
    """
    with pace.slowed(STEP_S):
        stream = Stream(mesh.url, LONG).start()
        assert stream.opened.wait(120)
        (record,) = mesh.move_away(stream.request_id)["migrations"]
    stream.result().assert_same(long)
    migration = receiver.wait_for("migrate one", lambda s: s.trace_id.hex() == record["traceparent"].split("-")[1])
    request = receiver.wait_for("text_completion one", lambda s: migration.trace_id in {link.trace_id for link in s.links})
    assert request.trace_id in {link.trace_id for link in migration.links}
    assert receiver.wait_for("round", lambda s: s.trace_id == migration.trace_id).parent_span_id == migration.span_id
    assert "move" in {e.name for e in request.events}
    until(lambda: mesh.inside("trace", stream.request_id, "--json")[0] == 0, what="the request's trace is written")
    _, drawn = mesh.inside("trace", stream.request_id)
    assert "continued on another instance" in drawn
    assert "round 1:" in drawn
    assert record["traceparent"].split("-")[1] in drawn
    handovers = mesh.json("trace", stream.request_id)["request"]["handovers"]
    assert [(h["kind"], h["migration_id"]) for h in handovers] == [("move", record["migration_id"])]
    migrated = mesh.cluster()["migrated"]
    assert migrated["requests"] >= 1
    assert migrated["outcomes"]["done"] >= 1
    gateway = httpx.get(f"{mesh.url}/metrics", timeout=120).text
    assert re.search(r'thaw_requests_pause_seconds_count\{.*thaw_kind="move".*\} [1-9]', gateway)
    migrator = httpx.get(f"http://127.0.0.1:{mesh.environment['THAW_MIGRATOR_METRICS_PORT']}/metrics", timeout=120).text
    for name in (
        "pause_seconds_count",
        "rounds_total",
        "kv_tokens_total",
        "kv_bytes_total",
        "moved_tokens_total",
        "requests_total",
    ):
        assert re.search(rf"thaw_migration_{name}\{{.*\}} [1-9]", migrator), name
    assert re.search(r"thaw_migration_tokens_total\{.*\} [0-9]", migrator)
    assert " received (" in drawn


def test_migration_of_a_finished_request_is_refused(mesh: Roomy, undisturbed: list[Stream]) -> None:
    error = mesh.error("migrate", undisturbed[0].request_id, "--to", "node-1")
    assert error["code"] == "not_found"
    assert "may be over" in error["message"]


def test_instance_migrates_with_its_whole_batch_and_is_freed(mesh: Roomy, pace: Pace, undisturbed: list[Stream]) -> None:
    with pace.slowed(STEP_S):
        streams = [Stream(mesh.url, each).start() for each in BODIES]
        assert all(s.opened.wait(120) for s in streams)
        instance, node = mesh.place("one")
        to = next(n for n in ("node-0", "node-1", "node-2") if n != node)
        (record,) = mesh.order(instance_id=instance, node=to)["migrations"]
    assert record["state"] == "done", record
    for stream, expected in zip(streams, undisturbed, strict=True):
        stream.result().assert_same(expected)
    until(lambda: instance not in mesh.on("one", node), what="the source has left")
    mesh.await_settled()


def test_a_node_is_drained_without_a_failed_request(mesh: Roomy, pace: Pace, undisturbed: list[Stream]) -> None:
    with contextlib.ExitStack() as slow:
        slow.enter_context(pace.slowed(STEP_S))
        streams = [Stream(mesh.url, each).start() for each in BODIES]
        assert all(s.opened.wait(120) for s in streams)
        _, node = mesh.place("one")
        try:
            drained = mesh.json("node", "drain", node)
            slow.close()
            assert drained["left"] == []
            for stream, expected in zip(streams, undisturbed, strict=True):
                stream.result().assert_same(expected)
            outcomes = [(m["outcome"], m["reason"]) for r in drained["migrations"] for m in r["requests"]]
            assert {outcome for outcome, _ in outcomes} <= {"moved", "finished"}, outcomes
        finally:
            mesh.json("node", "uncordon", node)


class Load:
    """Repeated streams, each compared with its undisturbed run."""

    def __init__(self, mesh: Roomy, undisturbed: list[Stream]) -> None:
        self.mesh, self.undisturbed = mesh, undisturbed
        self.over = threading.Event()
        self.faults: list[str] = []
        self.ended = 0
        self.threads = [threading.Thread(target=self._run, args=(i,), name="load") for i in range(STREAMS)]
        self._running: dict[int, Stream] = {}
        self._changed = threading.Condition()

    def _run(self, number: int) -> None:
        which = number % len(BODIES)
        while not self.over.is_set() and not self.faults:
            stream = Stream(self.mesh.url, BODIES[which]).start()
            stream.opened.wait(120)
            self._note(number, stream)
            try:
                stream.result().assert_same(self.undisturbed[which])
                self.ended += 1
            except AssertionError as e:
                self.faults.append(f"{stream.request_id}: {e}")
            self._note(number, None)

    def _note(self, number: int, stream: Stream | None) -> None:
        with self._changed:
            if stream is None:
                del self._running[number]
            else:
                self._running[number] = stream
            self._changed.notify_all()

    def any(self, draw: random.Random) -> Stream | None:
        """Return a stream in progress; None if there are no more."""
        with self._changed:
            self._changed.wait_for(lambda: self._running or self.faults, 60)
            return self._running[draw.choice(sorted(self._running))] if self._running else None

    def __enter__(self) -> Load:
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()
        for thread in self.threads:
            thread.join(240)


@pytest.mark.timeout(900 + 4 * MOVES)
def test_many_random_moves_under_load(mesh: Roomy, pace: Pace, undisturbed: list[Stream]) -> None:
    """Streams survive many random migrations under load.

    Most migrate a single request, some a whole instance. Requests that end before they migrate do
    not count.
    """
    mesh.everywhere("one")  # so that no migration needs a start
    draw = random.Random(20)
    done = tried = 0
    states: dict[str, int] = {}
    deadline = time.monotonic() + 300 + MOVES * 3
    with Load(mesh, undisturbed) as load, pace.slowed(LOAD_STEP_S):
        while done < MOVES and not load.faults:
            assert time.monotonic() < deadline, f"{done} moves of {MOVES}, {tried} tried: {states}"
            stream = load.any(draw)
            if stream is None:
                continue
            tried += 1
            try:
                answer = mesh.order(request_id=stream.request_id, node=f"node-{draw.randrange(3)}")
            except httpx.HTTPStatusError as e:
                if e.response.status_code not in (400, 404, 409):  # the request is there already, has ended, or is migrating
                    raise
                states["refused"] = states.get("refused", 0) + 1
                continue
            (record,) = answer["migrations"]
            states[record["state"]] = states.get(record["state"], 0) + 1
            done += record["state"] == "done"
    assert not load.faults, load.faults
    assert load.ended >= STREAMS
    assert states.get("failed", 0) == 0, states
    mesh.await_settled()


@pytest.mark.parametrize(
    ("constraint", "finish"),
    [
        ({"response_format": FORMAT}, "stop"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "travel"}}}, "tool_calls"),
    ],
    ids=["format", "tool"],
)
def test_constrained_output_survives_a_move_and_a_kill(mesh: Roomy, pace: Pace, constraint: dict[str, Any], finish: str) -> None:
    """The next engine continues the grammar where the response is, and returns the same JSON."""
    asked = {"model": "one", "messages": [{"role": "user", "content": "Where to?"}], "max_tokens": 2000, "seed": 5}
    asked |= constraint | {"return_token_ids": True}
    expected = ChatStream(mesh.url, asked).start().result()
    assert expected.finish == finish
    assert len(json.loads(expected.text)["cities"]) == 20
    with pace.slowed(STEP_S):
        stream = ChatStream(mesh.url, asked).start()
        until(lambda: len(stream.tokens) > 10, what="the response has begun")
        (record,) = mesh.move_away(stream.request_id)["migrations"]
        assert [moved["outcome"] for moved in record["requests"]] == ["moved"]
        begun = len(stream.tokens)
        until(lambda: len(stream.tokens) > begun, what="the response continues on the other node")
        kill(mesh.serving("one")[2])
    assert len(stream.tokens) < len(expected.tokens)
    stream.result().assert_same(expected)
    until(lambda: mesh.inside("trace", stream.request_id, "--json")[0] == 0, what="the request's trace is written")
    kinds = [h["kind"] for h in mesh.json("trace", stream.request_id)["request"]["handovers"]]
    assert kinds == ["move", "failover"]
    mesh.await_settled()
